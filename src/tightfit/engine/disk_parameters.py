"""Parameters whose values live on the disk and pass through a few host buffers to the device.

Each has a place in a file, in the pieces that updates have too, and comes to the device in the
order in which it is wanted (`carrier.py`).

What is trained has a place in a second file: an update writes there, and when all of a step is
written the files change roles for the parameters of it, as they do for states (`disk_records.py`).
Until then what the step has made is read by forward and can still be given up. What is frozen has
one place and is written when it is adopted. Knows nothing of units or of how values are updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.on_disk import spans, whole_blocks
from tightfit.bill.table import Kind
from tightfit.engine.carrier import Carrier, values_in
from tightfit.engine.pipeline import (
    Buffers,
    DiskTier,
    InUse,
    Part,
    ReadAhead,
    Writes,
)
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.ledger import local_part
from tightfit.policies import Tier

FETCH_BUFFERS = 4  # of the largest piece: two are read, one travels, one is free


class DiskParameters:
    """Values of parameters on the disk, of a DTensor the part of this rank; a `Home`.

    Args:
        parameters: in the order in which they are wanted.
        slab: asked for the buffers that values pass through on their way to the device.
        disk: has one file for all of them and one more for those that are trained.

    Raises:
        DoesNotFitError: the disk is too full for them; nothing was written.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        transfer: Transfer,
        slab: HostSlab,
        disk: DiskTier,
    ) -> None:
        self._transfer = transfer
        self._disk = disk
        self._offsets, sizes = _lay_out(parameters)
        self._files = disk.create(
            {name: {Kind.PARAMETERS: size} for name, size in zip(_FILES, sizes, strict=True)}
        )
        self._buffers = Buffers()
        for parameter in self._offsets:
            for begin, end in self.runs(parameter):
                self._buffers.need((end - begin) * parameter.element_size())
        self._buffers.reserve(slab, FETCH_BUFFERS)
        self._current = dict.fromkeys(self._offsets, 0)  # the file with what the last step has left
        self._newest = dict(self._current)  # and the one with what forward reads
        self._writes = Writes()
        self._written: dict[nn.Parameter, list[Arrival]] = {}
        self._shown: WeakValueDictionary[nn.Parameter, torch.Tensor] = WeakValueDictionary()
        self._carrier = Carrier(self._buffers, transfer)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's values live here."""
        return parameter in self._offsets

    @staticmethod
    def runs(parameter: nn.Parameter) -> list[tuple[int, int]]:
        """The pieces of a parameter, `[begin, end)` of its values."""
        return spans(local_part(parameter).numel())

    # To the device

    def send(self, places: Mapping[nn.Parameter, torch.Tensor]) -> list[Arrival]:
        """See `Home.send`; nothing waits here."""
        if self._disk.is_imaginary:
            return []
        row = [
            (self._newest_part(parameter, begin, end), place.view(-1)[begin:end])
            for parameter, place in places.items()
            for begin, end in self.runs(parameter)
        ]
        return [self._carrier.carry(row)]

    def _newest_part(self, parameter: nn.Parameter, begin: int, end: int) -> Part:
        """What forward reads: of an update whose writes are under way when these are done."""
        file = self._files[self._newest[parameter]]
        offset, size_bytes = self._place(parameter, begin, end)
        return _LatePart(file, offset, size_bytes, after=tuple(self._written.get(parameter, ())))

    # Updates

    def part(self, parameter: nn.Parameter, begin: int, end: int, at_bytes: int = 0) -> Part:
        """The blocks with the values `[begin, end)`, one of `runs`, that the last step has left.

        Args:
            at_bytes: where in a buffer they belong.
        """
        return self._part(self._current[parameter], parameter, begin, end, at_bytes)

    def write(
        self, parameter: nn.Parameter, begin: int, end: int, use: InUse, at_bytes: int = 0
    ) -> None:
        """Begin to write what a buffer has as the values `[begin, end)` that will be.

        Raises:
            DiskError: an earlier one could not be written.
        """
        part = self._part(self._next(parameter), parameter, begin, end, at_bytes)
        write = part.write(use.buffer)
        use.busy.append(write)
        self._written.setdefault(parameter, []).append(write)
        self._writes.add(write)

    def let_read(self, parameter: nn.Parameter) -> None:
        """All of `parameter` is being written: forward reads that from now on."""
        self._newest[parameter] = self._next(parameter)

    def finish(self) -> None:
        """Return when all is written.

        Raises:
            DiskError: something could not be.
        """
        self._writes.finish()

    def turn(self, parameters: Iterable[nn.Parameter]) -> None:
        """All of `parameters` was written, and that was waited for: it is there to stay."""
        for parameter in parameters:
            if self.has(parameter):
                self._current[parameter] = self._newest[parameter] = self._next(parameter)
                self._shown.pop(parameter, None)
        self._written.clear()

    def give_up(self) -> None:
        """Return when nothing is written any more; what the last step has left stays."""
        self._writes.abandon()
        self._newest = dict(self._current)
        self._written.clear()

    # Whole parameters

    @torch.no_grad()
    def adopt(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """See `Home.adopt`.

        Raises:
            DiskError: they cannot be written; what was there stays, but for what is frozen.
        """
        flat, runs = values.detach().reshape(-1), self.runs(parameter)
        try:
            with closing(ReadAhead(self._buffers, [[]] * len(runs))) as pieces:
                for begin, end in runs:
                    with pieces.piece() as use:
                        source = flat[begin:end]
                        self._transfer.copy(values_in(use.buffer, source), source).wait()
                        self.write(parameter, begin, end, use)
            self.finish()
        except BaseException:
            self.give_up()
            raise
        self.turn([parameter])

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """The values in host memory, the same tensor as before where it is still in use.

        Raises:
            DiskError: they cannot be read.
        """
        shown = self._shown.get(parameter)
        if shown is None:
            with ledger.labelled(Kind.BUFFERS, Tier.HOST):
                shown = torch.empty(local_part(parameter).shape, dtype=parameter.dtype)
            self.read_into(parameter, shown)
            self._shown[parameter] = shown
        return shown

    def read_into(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Copy the values to host memory, of any type.

        Raises:
            DiskError: they cannot be read.
        """
        for begin, end in self.runs(parameter):
            with self.piece(parameter, begin, end) as piece:
                values.view(-1)[begin:end].copy_(piece)

    @contextmanager
    def piece(self, parameter: nn.Parameter, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The values `[begin, end)`, one of `runs`, flat in a buffer.

        Raises:
            DiskError: they cannot be read.
        """
        parts = [[self.part(parameter, begin, end)]]
        with closing(ReadAhead(self._buffers, parts)) as pieces, pieces.piece() as use:
            size_bytes = (end - begin) * parameter.element_size()
            yield use.buffer[:size_bytes].view(parameter.dtype)

    # Places

    def _next(self, parameter: nn.Parameter) -> int:
        """The file that the next values are written to."""
        return 1 - self._current[parameter] if parameter.requires_grad else 0

    def _part(
        self, file: int, parameter: nn.Parameter, begin: int, end: int, at_bytes: int
    ) -> Part:
        return Part(self._files[file], *self._place(parameter, begin, end), at_bytes)

    def _place(self, parameter: nn.Parameter, begin: int, end: int) -> tuple[int, int]:
        """Where in a file some values begin, and the bytes of their blocks."""
        width = parameter.element_size()
        return self._offsets[parameter] + begin * width, whole_blocks((end - begin) * width)


_FILES = ("parameters-a", "parameters-b")


@dataclass(frozen=True)
class _LatePart(Part):
    """A part that may still be being written."""

    after: tuple[Arrival, ...] = ()

    def read(self, buffer: torch.Tensor) -> Arrival:
        """Begin to read it when it is there.

        Raises:
            DiskError: it could not be written.
        """
        for write in self.after:
            write.wait()
        return super().read(buffer)


def _lay_out(parameters: Iterable[nn.Parameter]) -> tuple[dict[nn.Parameter, int], tuple[int, int]]:
    """Where each begins, what is trained first, and bytes of all and of what is trained."""
    offsets: dict[nn.Parameter, int] = {}
    end_bytes = trained_bytes = 0
    for parameter in sorted(parameters, key=lambda parameter: not parameter.requires_grad):
        offsets[parameter] = end_bytes
        end_bytes += whole_blocks(local_part(parameter).numel() * parameter.element_size())
        if parameter.requires_grad:
            trained_bytes = end_bytes
    return offsets, (end_bytes, trained_bytes)
