"""Records of optimizer states in two files, of which one is whole at any time.

A piece of a parameter has one record, all its states side by side, so that a step reads and writes
each once. Every record has a place in two slots: what is current is read from one, what is new is
written to the other, and when all of it is written they change roles. A change that fails midway
leaves what was there before. Knows nothing of what states mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import nn

from tightfit.bill.on_disk import spans, whole_blocks
from tightfit.bill.optimizers import BLOCK_8BIT
from tightfit.bill.shards import ceil_divide
from tightfit.bill.table import Kind
from tightfit.engine.pipeline import DiskTier, InUse, Part, ReadAhead, Writes
from tightfit.ledger import local_part

Entries = Mapping[str, tuple[int, torch.dtype]]  # of one parameter, (elements, type) by name
States = dict[str, torch.Tensor]
MASTER = "master"
_ALIGN_BYTES = 64  # of each state in a record: a line of the processor's cache


@dataclass(frozen=True)
class Field:
    """Where a record has elements `[first, last)` of a state: at `at_bytes`."""

    at_bytes: int
    first: int
    last: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return (self.last - self.first) * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """It, flat, in a buffer with the record."""
        return buffer[self.at_bytes : self.at_bytes + self.size_bytes].view(self.dtype)


@dataclass(frozen=True)
class Record:
    """The states of a parameter's values `[begin, end)`; `size_bytes` is 0 where it has none."""

    begin: int
    end: int
    fields: Mapping[str, Field]
    offset_bytes: int
    size_bytes: int

    @property
    def values(self) -> int:
        """How many values of the parameter it is for."""
        return self.end - self.begin

    def states_in(self, buffer: torch.Tensor) -> States:
        """All states, flat, by name."""
        return {name: field.of(buffer) for name, field in self.fields.items()}


class Records:
    """The records of parameters, in the order in which they are given.

    Args:
        entries: of each parameter; those of a parameter's own size are split as it is, others are
            scales of blocks of 256 values.
        disk: asked for buffers that hold a record; has two files.

    Raises:
        DoesNotFitError: the disk is too full for both; nothing was written.
    """

    def __init__(self, entries: Mapping[nn.Parameter, Entries], disk: DiskTier) -> None:
        self._buffers = disk.buffers
        self._of, kinds = _lay_out(entries)
        for _, record in self.all():
            disk.buffers.need(record.size_bytes)
        self._slots = disk.create({"states-a": kinds, "states-b": kinds})
        self._current = dict.fromkeys(entries, 0)  # the slot that has a parameter's states
        self._writes = Writes()
        self._is_imaginary = disk.is_imaginary

    def of(self, parameter: nn.Parameter) -> Sequence[Record]:
        """A parameter's records in the order of its values; in a dry run the first, as they are
        alike."""
        return self._of[parameter][: 1 if self._is_imaginary else None]

    def all(self) -> Iterator[tuple[nn.Parameter, Record]]:
        """All records in their order on the disk."""
        return ((parameter, record) for parameter, own in self._of.items() for record in own)

    def parts(self, parameter: nn.Parameter, record: Record) -> list[Part]:
        """What is read for a record as it is now; nothing where it has no states."""
        slot = self._slots[self._current[parameter]]
        return [Part(slot, record.offset_bytes, record.size_bytes)] if record.size_bytes else []

    def write(self, parameter: nn.Parameter, record: Record, use: InUse) -> None:
        """Begin to write what a buffer has as the record that will be.

        Raises:
            DiskError: an earlier one could not be written.
        """
        if record.size_bytes:
            slot = self._slots[1 - self._current[parameter]]
            write = Part(slot, record.offset_bytes, record.size_bytes).write(use.buffer)
            use.busy.append(write)
            self._writes.add(write)

    def turn(self, parameters: Iterable[nn.Parameter]) -> None:
        """All records of `parameters` were written: when that is done they are the current ones.

        Raises:
            DiskError: one could not be written; nothing has changed.
        """
        self._writes.finish()
        for parameter in parameters:
            self._current[parameter] = 1 - self._current[parameter]

    def give_up(self) -> None:
        """Return when nothing is written any more; what is current stays so."""
        self._writes.abandon()

    def read(self, parameter: nn.Parameter, found: States) -> None:
        """Fill the states of a parameter, which are whole and on the host.

        Raises:
            DiskError: they cannot be read.
        """
        parts = [self.parts(parameter, record) for record in self.of(parameter)]
        with closing(ReadAhead(self._buffers, parts)) as pieces:
            for record in self.of(parameter):
                with pieces.piece() as use:
                    for name, field in record.fields.items():
                        found[name].view(-1)[field.first : field.last].copy_(field.of(use.buffer))

    def rewrite(
        self,
        parameters: Sequence[nn.Parameter],
        change: Callable[[nn.Parameter, Record, States], None],
        *,
        reads: bool,
    ) -> None:
        """Make new records, a piece at a time, from the current ones or from nothing.

        Args:
            change: given the states of a record, flat; what is not filled without `reads` is
                undefined.

        Raises:
            DiskError: one could not be read or written; nothing has changed.
        """
        records = [(parameter, record) for parameter in parameters for record in self.of(parameter)]
        parts = [self.parts(*each) if reads else [] for each in records]
        try:
            with closing(ReadAhead(self._buffers, parts)) as pieces:
                for parameter, record in records:
                    with pieces.piece() as use:
                        change(parameter, record, record.states_in(use.buffer))
                        self.write(parameter, record, use)
            self.turn(parameters)
        except BaseException:
            self.give_up()
            raise


def _lay_out(
    entries: Mapping[nn.Parameter, Entries],
) -> tuple[dict[nn.Parameter, list[Record]], dict[Kind, int]]:
    """The place of each record in a slot, and bytes of a slot by kind."""
    records: dict[nn.Parameter, list[Record]] = {}
    end_bytes = master_bytes = 0
    for parameter, states in entries.items():
        values = local_part(parameter).numel()
        records[parameter] = []
        for begin, end in spans(values):
            fields, size_bytes = _fields(states, values, begin, end)
            records[parameter].append(Record(begin, end, fields, end_bytes, size_bytes))
            end_bytes += size_bytes
            master_bytes += fields[MASTER].size_bytes if MASTER in fields else 0
    states_bytes = end_bytes - master_bytes
    return records, {Kind.MASTER_WEIGHTS: master_bytes, Kind.OPTIMIZER_STATES: states_bytes}


def _fields(states: Entries, values: int, begin: int, end: int) -> tuple[dict[str, Field], int]:
    """Where a record has its states, and its bytes in whole blocks."""
    fields = {}
    at_bytes = 0
    for name, (elements, dtype) in states.items():
        first, last = begin, end
        if elements != values:  # a scale for each block
            first, last = begin // BLOCK_8BIT, ceil_divide(end, BLOCK_8BIT)
        fields[name] = Field(at_bytes, first, last, dtype)
        at_bytes += ceil_divide(fields[name].size_bytes, _ALIGN_BYTES) * _ALIGN_BYTES
    return fields, whole_blocks(at_bytes)
