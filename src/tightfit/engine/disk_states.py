"""Optimizer states, and fp32 masters with them, that live on the disk.

A step passes their records through the pipeline in the order of forward. It reads one slot and
writes the other (`disk_records.py`), so that one which fails midway (disk full, read error) leaves
the states of the step before whole. That takes twice the space and no time: nothing is flushed or
renamed, as the files are nameless scratch of this process. A kill leaves nothing of them; a new run
begins from a checkpoint, which has everything, and never trusts what a killed one left.

Parameters on the host are updated in place there. After a step that failed they, and with them a
split master, of which they are the upper half, are partly those of the failed step. Parameters on
the disk pass through with their states and, like these, stay as they were.

Step counters stay on the host. Knows nothing of models, or of when an update is due.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.on_disk import whole_blocks
from tightfit.bill.table import Kind
from tightfit.engine.arithmetic import Numbers
from tightfit.engine.disk_gradients import DiskGradient
from tightfit.engine.disk_parameters import DiskParameters
from tightfit.engine.disk_records import MASTER, Entries, Record, Records, States
from tightfit.engine.pipeline import DiskTier, Part, ReadAhead
from tightfit.engine.rules import REMAINDERS, Piece, Rule, Scratch
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.ledger import local_part
from tightfit.policies import Tier

_STEP = "step"


@dataclass(frozen=True)
class DueUpdate:
    """What a step has for one parameter.

    Attributes:
        gradient: this rank's part, on the host or on the disk; consumed.
        values: where the parameter's values are, this rank's part; not looked at where that is the
            disk.
        publishes: whether that is on the device, which gets copies; else they are on the host and
            changed there.
    """

    parameter: nn.Parameter
    gradient: torch.Tensor | DiskGradient
    numbers: Numbers
    values: torch.Tensor
    publishes: bool


class DiskStates:
    """States of parameters on the disk; `begin`, `update` for each unit and `finish` make a step.

    Args:
        parameters: those whose states they are, in the order in which updates will come.
        needs_master: whether an fp32 master is among a parameter's states.
        slab: asked for memory to compute in.
        disk: asked for buffers that hold a piece; has both slots.
        reads_gradients: whether gradients are on the disk as well.

    Raises:
        DoesNotFitError: the disk is too full for both slots; nothing was written.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rule: Rule,
        needs_master: Callable[[nn.Parameter], bool],
        transfer: Transfer,
        slab: HostSlab,
        disk: DiskTier,
        *,
        reads_gradients: bool,
    ) -> None:
        self._rule = rule
        self._transfer = transfer
        self._disk = disk
        self._entries = {p: _entries(p, rule, master=needs_master(p)) for p in parameters}
        self._records = Records(self._entries, disk)
        self._reads_gradients = reads_gradients
        self._parameters: DiskParameters | None = None
        for parameter, record in self._records.all():
            disk.buffers.need(self._end_bytes(parameter, record))
        narrow = [p.dtype for p in self._entries if p.dtype is not torch.float32]
        self._gradient_type = narrow[0] if narrow else torch.float32
        largest = max((record.values for _, record in self._records.all()), default=0)
        count = rule.scratch_values(largest, self._gradient_type)
        self._memory = slab.reserve((count,), torch.float32, Kind.BUFFERS)
        self._scratch: Scratch | None = None
        self._steps: dict[nn.Parameter, torch.Tensor] = {}
        self._due: dict[Hashable, Sequence[DueUpdate]] = {}
        self._stepping: list[nn.Parameter] = []
        self._clip: torch.Tensor | None = None
        self._reading: ReadAhead | None = None

    def update_on_disk(self, parameters: DiskParameters) -> None:
        """Have those of `parameters` updated there; before buffers are reserved."""
        self._parameters = parameters
        for parameter, record in self._records.all():
            if parameters.has(parameter):
                values_bytes = whole_blocks(record.values * parameter.element_size())
                self._disk.buffers.need(self._end_bytes(parameter, record) + values_bytes)

    def _end_bytes(self, parameter: nn.Parameter, record: Record) -> int:
        """Where in a buffer a record, and the gradient behind it, end."""
        gradient_bytes = whole_blocks(record.values * parameter.element_size())
        return record.size_bytes + (gradient_bytes if self._reads_gradients else 0)

    def _on_disk(self, parameter: nn.Parameter) -> DiskParameters | None:
        """What has the parameter's values, if that is the disk."""
        parameters = self._parameters
        return parameters if parameters is not None and parameters.has(parameter) else None

    @torch.no_grad()
    def create(self, values: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Make all states, a piece at a time; the slab has its memory.

        Args:
            values: a parameter's, wherever they are but on the disk; masters begin with them.
        """
        with ledger.labelled(Kind.BUFFERS, Tier.HOST):
            self._scratch = self._rule.scratch(self._memory.tensor, self._gradient_type)
        if self._rule.counts_steps:
            with ledger.labelled(Kind.OPTIMIZER_STATES, Tier.HOST):
                self._steps = {p: torch.zeros((), dtype=torch.float32) for p in self._entries}

        def fill(parameter: nn.Parameter, record: Record, states: States) -> None:
            master = states.pop(MASTER, None)
            if master is not None and self._on_disk(parameter) is None:
                master.copy_(values(parameter).view(-1)[record.begin : record.end])
            elif master is not None:
                self._fill_master(parameter, record, master)
            self._rule.initialise(states)

        self._records.rewrite(list(self._entries), fill, reads=False)

    def _fill_master(self, parameter: nn.Parameter, record: Record, master: torch.Tensor) -> None:
        on_disk = self._on_disk(parameter)
        assert on_disk is not None
        with on_disk.piece(parameter, record.begin, record.end) as values:
            master.copy_(values)

    # A step

    def begin(self, due: Mapping[Hashable, Sequence[DueUpdate]], clip: torch.Tensor | None) -> None:
        """All updates of a step are known: reading begins.

        Args:
            due: by unit, in the order in which `update` will be called.
            clip: what gradients are multiplied by, an fp32 scalar on the host.
        """
        assert self._reading is None, "the step before was not finished"
        self._due, self._clip = dict(due), clip
        everything = [update for updates in due.values() for update in updates]
        self._stepping = [update.parameter for update in everything]
        self._count(1)
        parts = [
            self._parts(update, record)
            for update in everything
            for record in self._records.of(update.parameter)
        ]
        self._reading = ReadAhead(self._disk.buffers, parts)

    @torch.no_grad()
    def update(self, unit: Hashable) -> list[Arrival]:
        """Apply what is due for `unit`; in any thread, allocates nothing of any size.

        Returns:
            Copies to the device that the unit's forward has to wait for.

        Raises:
            DiskError: something could not be read or written. The step is given up: states are
                those of the step before, and so are parameters on the disk; others partly are not.
        """
        copies: list[Arrival] = []
        try:
            for update in self._due.pop(unit, ()):
                for record in self._records.of(update.parameter):
                    copies += self._update(update, record)
                on_disk = self._on_disk(update.parameter)
                if on_disk is not None:
                    on_disk.let_read(update.parameter)
            return copies
        except BaseException:
            self.give_up()
            raise

    def finish(self) -> None:
        """Return when all is written: from now on states are those of this step.

        Does nothing when no step was begun, or it was given up.

        Raises:
            DiskError: as `update`.
        """
        if self._reading is None:
            return
        assert not self._due, "updates of this step were not asked for"
        try:
            if self._parameters is not None:
                self._parameters.finish()
            self._records.turn(self._stepping)
        except BaseException:
            self.give_up()
            raise
        if self._parameters is not None:
            self._parameters.turn(self._stepping)
        self._reading = self._clip = None

    def give_up(self) -> None:
        """End a step that has failed, here or elsewhere; nothing when none was begun.

        All buffers are free again, states and counters are those of the step before.
        """
        if self._reading is not None:
            self._reading.close()
            self._reading = self._clip = None
            self._records.give_up()
            if self._parameters is not None:
                self._parameters.give_up()
            self._due.clear()
            self._count(-1)

    def _count(self, change: int) -> None:
        if self._rule.counts_steps and self._stepping:
            torch._foreach_add_([self._steps[parameter] for parameter in self._stepping], change)

    def _parts(self, update: DueUpdate, record: Record) -> list[Part]:
        """What an update reads: the record, behind it the gradient, behind that the parameter.

        Not a parameter that has a master, from which it is made.
        """
        parts = self._records.parts(update.parameter, record)
        if isinstance(update.gradient, DiskGradient):
            parts.append(update.gradient.part(record.begin, record.end, record.size_bytes))
        on_disk = self._on_disk(update.parameter)
        if on_disk is not None and MASTER not in record.fields:
            at_bytes = self._end_bytes(update.parameter, record)
            parts.append(on_disk.part(update.parameter, record.begin, record.end, at_bytes))
        return parts

    def _update(self, due: DueUpdate, record: Record) -> list[Arrival]:
        assert self._reading is not None
        assert self._scratch is not None
        with self._reading.piece() as use:
            values = self._values(due, record, use.buffer)
            piece = self._piece(due, record, values, use.buffer)
            self._rule.update([piece], due.numbers, self._clip, self._scratch)
            if due.publishes:
                source = piece.weight if piece.narrow is None else piece.narrow
                assert source is not None
                # Nothing on the device reads the parameter any more: its gradient has left.
                use.busy.append(self._transfer.copy(values, source, ordered=False))
            copies = list(use.busy)
            self._records.write(due.parameter, record, use)
            on_disk = self._on_disk(due.parameter)
            if on_disk is not None:
                at_bytes = self._end_bytes(due.parameter, record)
                on_disk.write(due.parameter, record.begin, record.end, use, at_bytes)
        return copies

    def _values(self, due: DueUpdate, record: Record, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's values, flat, where the update writes them."""
        if self._on_disk(due.parameter) is None:
            return due.values.view(-1)[record.begin : record.end]
        begin = self._end_bytes(due.parameter, record)
        size_bytes = record.values * due.parameter.element_size()
        return buffer[begin : begin + size_bytes].view(due.parameter.dtype)

    def _piece(
        self, due: DueUpdate, record: Record, values: torch.Tensor, buffer: torch.Tensor
    ) -> Piece:
        """What a buffer has, as the rule takes it; 16-bit values travel through the gradient."""
        states = record.states_in(buffer)
        if isinstance(due.gradient, DiskGradient):
            gradient = due.gradient.values(buffer, record.begin, record.end, record.size_bytes)
        else:
            gradient = due.gradient.view(-1)[record.begin : record.end]
        weight = states.pop(MASTER, None)
        if weight is None and states.keys().isdisjoint(REMAINDERS.values()):
            weight = values
        narrow = None
        if due.parameter.dtype is not torch.float32:
            narrow = gradient if due.publishes else values
        return Piece(weight, gradient, states, self._steps.get(due.parameter), narrow)

    # Saved states

    def entries(self, parameter: nn.Parameter) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Types and shapes of `state`; its order is that of states in memory."""
        part = local_part(parameter)
        own = {
            name: (dtype, part.shape if elements == part.numel() else torch.Size((elements,)))
            for name, (elements, dtype) in self._entries[parameter].items()
        }
        master = {MASTER: own.pop(MASTER)} if MASTER in own else {}
        step = {_STEP: (torch.float32, torch.Size(()))} if self._rule.counts_steps else {}
        return {**master, **step, **own}

    @torch.no_grad()
    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """A parameter's states by name, this rank's part, in new host tensors; finish first.

        Raises:
            DiskError: they cannot be read.
        """
        assert self._reading is None, "the step was not finished"
        with ledger.labelled(Kind.BUFFERS, Tier.HOST):
            found = {
                name: torch.empty(shape, dtype=dtype)
                for name, (dtype, shape) in self.entries(parameter).items()
            }
        if _STEP in found:
            found[_STEP].copy_(self._steps[parameter])
        self._records.read(parameter, found)
        return found

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Take over saved states, or values as a master; those that are not given stay.

        Args:
            states: as in `state`, of any type and on any tier.

        Raises:
            DiskError: they cannot be written; what was there before stays.
        """
        assert self._reading is None, "the step was not finished"

        def change(_: nn.Parameter, record: Record, kept: States) -> None:
            for name in kept.keys() & states.keys():
                field = record.fields[name]
                if name == MASTER and not states[name].untyped_storage().nbytes():
                    self._fill_master(parameter, record, kept[name])  # the parameter itself
                else:
                    kept[name].copy_(states[name].reshape(-1)[field.first : field.last])

        some = not self._entries[parameter].keys() <= states.keys()
        self._records.rewrite([parameter], change, reads=some)
        if _STEP in states and parameter in self._steps:
            self._steps[parameter].copy_(states[_STEP])


def _entries(parameter: nn.Parameter, rule: Rule, *, master: bool) -> Entries:
    """States of a parameter, its master first."""
    shape = local_part(parameter).shape
    masters: Entries = {MASTER: (shape.numel(), torch.float32)} if master else {}
    return {**masters, **rule.states(shape)}
