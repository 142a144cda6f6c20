"""Stopping a run with Ctrl-C or SIGTERM: the first asks, the second ends it at once.

Does not know what is stopped; whoever asks for `raised` does.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptFlag:
    """Inside, a first signal sets `raised` and a second one acts as it did before.

    Outside the main thread, where signals cannot be caught, it stays as it is.
    """

    def __init__(self) -> None:
        self.raised = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]
