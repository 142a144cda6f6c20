"""Gradients that wait for the optimizer on the disk.

Each leaves the device as soon as backward has finished it, in pieces, through the buffers that the
NVMe tier's pipeline has; nothing of it stays on the host. What a second micro-batch adds is what
the disk has, added on the device, where the gradient is whole: so its norm is that of one tensor,
as everywhere else, and is known without another look at the disk. Knows nothing of what is done
with gradients afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.on_disk import spans, whole_blocks
from tightfit.bill.table import Kind
from tightfit.engine.hooks import when_accumulated
from tightfit.engine.pipeline import (
    BookedFile,
    DiskTier,
    InUse,
    Part,
    ReadAhead,
)
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.errors import TrainingError
from tightfit.ledger import local_part


@dataclass(frozen=True)
class DiskGradient:
    """Where a gradient is: its values in their order, from a place in a file."""

    file: BookedFile
    offset_bytes: int
    dtype: torch.dtype

    def part(self, begin: int, end: int, at_bytes: int = 0) -> Part:
        """The blocks with the values `[begin, end)`; `begin` is where one of `spans` begins.

        Args:
            at_bytes: where in a buffer they belong.
        """
        offset = self.offset_bytes + begin * self.dtype.itemsize
        return Part(self.file, offset, whole_blocks((end - begin) * self.dtype.itemsize), at_bytes)

    def values(self, buffer: torch.Tensor, begin: int, end: int, at_bytes: int = 0) -> torch.Tensor:
        """The values `[begin, end)` in a buffer that has their part, or is to have it."""
        return buffer[at_bytes : at_bytes + (end - begin) * self.dtype.itemsize].view(self.dtype)


class _Leaving:
    """A piece on its way to a buffer and from there to the disk; an `Arrival`.

    It is written when the next piece is on its way, or when somebody waits for it.
    """

    def __init__(self, arrival: Arrival, part: Part, buffer: torch.Tensor) -> None:
        self._arrival = arrival
        self._part = part
        self._buffer = buffer
        self._write: Arrival | None = None
        self._lock = threading.Lock()

    def go_on(self) -> Arrival:
        """Begin to write what has arrived."""
        with self._lock:
            if self._write is None:
                self._arrival.wait()
                self._write = self._part.write(self._buffer)
            return self._write

    def wait(self) -> None:
        """See `Arrival.wait`."""
        self.go_on().wait()

    def order(self) -> None:
        """See `Arrival.order`."""
        self.wait()


class DiskGradients:
    """A `GradientStore` whose gradients are `DiskGradient`s.

    Args:
        parameters: those whose gradients go to the disk, in the order of their units.
        disk: asked for buffers that hold a piece; has one file, with all gradients.

    Raises:
        DoesNotFitError: the disk is too full.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], transfer: Transfer, disk: DiskTier
    ) -> None:
        self._transfer = transfer
        self._buffers = disk.buffers
        self._places = _place(list(parameters), disk)
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._leaving: dict[nn.Parameter, list[_Leaving]] = {}
        self._last: _Leaving | None = None
        for parameter in self._places:
            when_accumulated(parameter, self._collect)

    def take(self) -> dict[nn.Parameter, DiskGradient]:
        """The summed gradients of all backward calls since `clear`, all of them written.

        Raises:
            DiskError: one could not be.
        """
        for parameter in list(self._leaving):
            self._wait(parameter)
        return {p: place for p, place in self._places.items() if p in self._norms}

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """The 2-norm of each gradient that `take` gives, an fp32 scalar on the device."""
        return {p: self._norms[p] for p in self._places if p in self._norms}

    def clear(self) -> None:
        """Forget them; a next backward begins a new sum. Also after one that failed midway."""
        for parameter in list(self._leaving):
            with suppress(TrainingError):
                self._wait(parameter)
        self._leaving.clear()
        self._norms.clear()
        for parameter in self._places:
            parameter.grad = None

    def _wait(self, parameter: nn.Parameter) -> None:
        """Return when what the parameter's last backward left behind is written."""
        for piece in self._leaving.get(parameter, ()):
            piece.wait()
        self._leaving.pop(parameter, None)

    @torch.no_grad()
    def _collect(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        gradient = local_part(parameter.grad).reshape(-1)
        ledger.mark(gradient, Kind.GRADIENTS)
        place, adds = self._places[parameter], parameter in self._norms
        runs = spans(gradient.numel())
        self._wait(parameter)
        self._leaving[parameter] = []
        parts = [[place.part(*run)] if adds else [] for run in runs]
        with closing(ReadAhead(self._buffers, parts)) as pieces:
            for run in runs:
                with pieces.piece() as use:
                    self._send(parameter, gradient[slice(*run)], run, use, adds=adds)
        with ledger.labelled(Kind.TEMPORARIES):
            self._norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        parameter.grad = None

    def _send(
        self,
        parameter: nn.Parameter,
        gradient: torch.Tensor,
        run: tuple[int, int],
        use: InUse,
        *,
        adds: bool,
    ) -> None:
        """Let one piece go, with what the buffer has of it added if there was something."""
        place = self._places[parameter]
        travelling = place.values(use.buffer, *run)
        if adds:
            with ledger.labelled(Kind.TRANSFER):
                landed = torch.empty_like(gradient)
            self._transfer.copy(landed, travelling).order()
            gradient.add_(landed)
        arrival = self._transfer.copy(travelling, gradient)
        leaving = _Leaving(arrival, place.part(*run), use.buffer)
        use.busy.append(leaving)
        self._leaving[parameter].append(leaving)
        if self._last is not None:
            self._last.go_on()  # it has arrived meanwhile
        self._last = leaving


def _place(parameters: list[nn.Parameter], disk: DiskTier) -> dict[nn.Parameter, DiskGradient]:
    """A place for the gradient of each parameter, one after the other in one file."""
    offsets = []
    size_bytes = 0
    for parameter in parameters:
        part = local_part(parameter)
        offsets.append(size_bytes)
        size_bytes += whole_blocks(part.numel() * part.element_size())
        for begin, end in spans(part.numel()):
            disk.buffers.need((end - begin) * part.element_size())
    (file,) = disk.create({"gradients": {Kind.GRADIENTS: size_bytes}})
    return {
        parameter: DiskGradient(file, offset, parameter.dtype)
        for parameter, offset in zip(parameters, offsets, strict=True)
    }
