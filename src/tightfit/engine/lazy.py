"""Updates that go on while the next forward runs: each unit waits for its own and for no other.

A worker thread takes updates in the order of forward. It makes no collectives and, since a ledger
sees its own thread alone, no tensors of any size. Knows nothing of what an update is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tightfit.engine.units import Unit


class DueUpdates:
    """Updates that were promised, by unit.

    Args:
        lazy: whether a thread does them; else they are done when they are given.
        prepare_thread: called once in the thread before anything else, to bind it and to say how
            many threads its products may use.
    """

    def __init__(self, *, lazy: bool, prepare_thread: Callable[[], None] | None = None) -> None:
        self._due: dict[Unit, list[Future[None]]] = {}
        self._error: BaseException | None = None
        self._worker = (
            ThreadPoolExecutor(1, "tightfit-update", prepare_thread or _nothing) if lazy else None
        )

    def add(self, unit: Unit, update: Callable[[], None]) -> None:
        """Do `update` now, or promise it for `unit`. One that fails keeps those after it undone."""
        if self._worker is None:
            update()
        else:
            self._due.setdefault(unit, []).append(self._worker.submit(self._do, update))

    def _do(self, update: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            update()
        except BaseException as error:  # told to whoever waits, of this unit or of a later one
            self._error = error
            raise

    def wait(self, unit: Unit) -> None:
        """Return when the unit's updates are done; raises what one of them, or an earlier one, has
        raised."""
        for update in self._due.pop(unit, ()):
            update.result()

    def is_done(self, unit: Unit) -> bool:
        """Whether nobody would have to wait for the unit now."""
        return all(update.done() for update in self._due.get(unit, ()))

    def drain(self) -> None:
        """Return when all updates are done; raises like `wait`."""
        for unit in list(self._due):
            self.wait(unit)

    def close(self) -> None:
        """Finish what was promised and end the thread."""
        if self._worker is not None:
            self._worker.shutdown()


def _nothing() -> None:
    """A thread needs no preparation."""
