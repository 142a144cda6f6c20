"""How much of the processors other processes take while something is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil


class OthersBusy:
    """Counts what others take.

    Attributes:
        cores: on average, while it was watching; 0 before.
    """

    def __init__(
        self,
        others_seconds: Callable[[], float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cores = 0.0
        self._others_seconds = others_seconds or _others_seconds
        self._now = now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, what they take counts; this process should have no children at work there."""
        taken, started = self._others_seconds(), self._now()
        yield
        passed = max(self._now() - started, 1e-9)
        self.cores = max(0.0, (self._others_seconds() - taken) / passed)


def _others_seconds() -> float:
    """Processor seconds of all processes but this one since the machine started."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # What guests take is in `user` already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    own = psutil.Process().cpu_times()
    return float(sum(times) - guests - idle - own.user - own.system)
