"""Carries pieces from the disk to the device, in a thread of its own.

They are read ahead through a few host buffers and each is handed on as it comes, so that neither a
unit nor a parameter has to fit into the buffers, and whoever wants them waits for nothing but the
disk. Knows nothing of what the pieces are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

import torch

from tightfit.engine.pipeline import Buffers, Part, ReadAhead
from tightfit.engine.transfer import Arrival, Transfer


class Carrier:
    """Fills memory on the device from the disk, one row of pieces after the other.

    Args:
        buffers: that no other thread holds for long, at least one of them free.
    """

    def __init__(self, buffers: Buffers, transfer: Transfer) -> None:
        self._buffers = buffers
        self._transfer = transfer
        self._thread = ThreadPoolExecutor(1, "tightfit-fetch", partial(_prepare, transfer.device))
        self._gate = _Gate(transfer.device)

    def carry(self, row: Sequence[tuple[Part, torch.Tensor]]) -> Arrival:
        """Begin to fill each tensor, flat and on the device, with what its part has.

        Ordered as `Transfer.copy` is: after what the current stream has been given so far.
        """
        copies: list[Arrival] = []
        carried = self._thread.submit(self._carry, row, copies, self._gate.open())
        return _Carried(carried, copies)

    def _carry(
        self,
        row: Sequence[tuple[Part, torch.Tensor]],
        copies: list[Arrival],
        begun: torch.cuda.Event | None,
    ) -> None:
        with (
            self._gate.after(begun),
            closing(ReadAhead(self._buffers, [[part] for part, _ in row])) as pieces,
        ):
            for _, place in row:
                with pieces.piece() as use:
                    copies.append(self._transfer.copy(place, values_in(use.buffer, place)))
                    use.busy.append(copies[-1])


def values_in(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """As many values at the beginning of a buffer, of the same type."""
    return buffer[: like.numel() * like.element_size()].view(like.dtype)


class _Carried:
    """Values on their way; an `Arrival`."""

    def __init__(self, carried: Future[None], copies: Sequence[Arrival]) -> None:
        self._carried = carried
        self._copies = copies

    def wait(self) -> None:
        """See `Arrival.wait`.

        Raises:
            DiskError: something could not be read. What could has arrived.
        """
        try:
            self._carried.result()
        finally:
            for copy in self._copies:
                copy.wait()

    def order(self) -> None:
        """See `Arrival.order`; no stream can wait for a disk."""
        try:
            self._carried.result()
        finally:
            for copy in self._copies:
                copy.order()


class _Gate:
    """Has copies that another thread begins come after what the device had been given before.

    What it is given meanwhile, such as the work of a unit that is there, they need not wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def open(self) -> torch.cuda.Event | None:
        """What the current stream has been given so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Ordered copies inside come after `event`."""
        if self._stream is None or event is None:
            yield
            return
        self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield


def _prepare(device: torch.device) -> None:
    """The thread copies with one processor, and to this card."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
