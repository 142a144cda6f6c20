"""A rank's end of the pipe to its supervisor: when the supervisor is gone, the rank goes too."""

from __future__ import annotations

import os
import threading

from tightfit.launch.environment import LIFELINE, Environment

_FAILED = 1


def hold_lifeline(environment: Environment) -> None:
    """End this process when its supervisor has ended, however that came about."""
    if LIFELINE in environment:
        descriptor = int(environment[LIFELINE])
        threading.Thread(target=_wait, args=(descriptor,), daemon=True, name="lifeline").start()


def _wait(descriptor: int) -> None:
    # Nobody ever writes: this returns when the last writing end is closed.
    os.read(descriptor, 1)
    os._exit(_FAILED)
