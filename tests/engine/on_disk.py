"""The same optimizer steps twice: with states on the disk, and with whole ones in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tightfit.bill import on_disk
from tightfit.engine.arithmetic import Numbers
from tightfit.engine.disk_gradients import DiskGradients
from tightfit.engine.disk_states import DiskStates, DueUpdate
from tightfit.engine.lazy import DueUpdates
from tightfit.engine.pipeline import DiskTier
from tightfit.engine.rule_of import rule_of
from tightfit.engine.rules import REMAINDERS, Piece, Rule
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.policies import OptimizerPolicy

CPU = torch.device("cpu")
PIECE = 8192
# Of no piece, no block, no vector; of one piece, and one more; three uneven ones; none at all.
SHAPES = ((1,), (0,), (15, 3), (PIECE,), (PIECE + 1,), (2, PIECE + 259), (4095,), (64, 64))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of a few thousand values have several pieces."""
    monkeypatch.setattr(on_disk, "PIECE_VALUES", PIECE)


def make_parameters(
    dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    """The same values at every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients_of(step: int, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of a step, the same at every call."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]


def numbers_of(step: int, index: int) -> Numbers:
    """A schedule, and decay for every second parameter."""
    return Numbers(1e-2 / (1 + step), 0.1 * (index % 2), (0.9, 0.99), 1e-8)


def clip_of(step: int) -> torch.Tensor | None:
    """A factor for every second step."""
    return torch.tensor(0.37) if step % 2 else None


class Resident:
    """Parameters whose states are whole tensors in memory, updated by the rule at once."""

    def __init__(self, policy: OptimizerPolicy, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._rule = rule_of(policy)
        self.states = [self._make(p, policy) for p in parameters]
        types = {p.dtype for p in parameters}
        narrow = torch.bfloat16 if torch.bfloat16 in types else torch.float32
        largest = max(p.numel() for p in parameters)
        self._scratch = self._rule.scratch(
            torch.empty(self._rule.scratch_values(largest, narrow)), narrow
        )

    def _make(self, parameter: nn.Parameter, policy: OptimizerPolicy) -> dict[str, torch.Tensor]:
        states = {
            name: torch.empty(elements, dtype=dtype)
            for name, (elements, dtype) in self._rule.states(parameter.shape).items()
        }
        self._rule.initialise(states)
        if not policy.split_master:
            states["master"] = parameter.detach().float().clone().view(-1)
        if self._rule.counts_steps:
            states["step"] = torch.zeros(())
        return states

    @torch.no_grad()
    def step(self, step: int, skipped: Sequence[int] = ()) -> None:
        for index, gradient in enumerate(gradients_of(step, self.parameters)):
            if index not in skipped and gradient.numel():
                self._update(index, gradient.view(-1), step)
            elif index not in skipped and self._rule.counts_steps:
                self.states[index]["step"].add_(1)

    def _update(self, index: int, gradient: torch.Tensor, step: int) -> None:
        parameter, states = self.parameters[index], dict(self.states[index])
        master, count = states.pop("master", None), states.pop("step", None)
        if count is not None:
            count.add_(1)
        narrow = parameter.view(-1) if parameter.dtype is not torch.float32 else None
        piece = Piece(master, gradient, states, count, narrow)
        self._rule.update([piece], numbers_of(step, index), clip_of(step), self._scratch)
        if narrow is None:
            parameter.view(-1).copy_(master)


@dataclass
class Unit:
    """Stands for a unit of a model."""

    name: str

    def __hash__(self) -> int:
        return hash(self.name)


class OnDisk:
    """The same parameters with states, and if wanted gradients, on the disk.

    Two parameters make a unit. As in a training run, the end of a step is waited for before the
    next, and a parameter is read when its own copies were waited for.
    """

    def __init__(
        self,
        policy: OptimizerPolicy,
        parameters: list[nn.Parameter],
        folder: Path,
        *,
        transfer: Transfer | None = None,
        disk_gradients: bool = True,
        publishes: bool = True,
        lazy: bool = False,
        buffers: int = 6,
    ) -> None:
        self.parameters = parameters
        self.publishes = publishes
        self.transfer = transfer or Transfer(CPU)
        self.rule: Rule = rule_of(policy)
        self.slab = HostSlab(CPU)
        self.disk = DiskTier(folder)
        self.gradients = (
            DiskGradients(parameters, self.transfer, self.disk) if disk_gradients else None
        )
        self.states = DiskStates(
            parameters,
            self.rule,
            self._needs_master(policy),
            self.transfer,
            self.slab,
            self.disk,
            reads_gradients=disk_gradients,
        )
        self.due = DueUpdates(lazy=lazy)
        self.arrivals: list[Arrival] = []
        self.disk.buffers.reserve(self.slab, buffers)
        self.slab.allocate()
        self.states.create(lambda parameter: parameter.detach())

    def _needs_master(self, policy: OptimizerPolicy) -> Callable[[nn.Parameter], bool]:
        if policy.split_master:
            return lambda parameter: False
        return lambda parameter: self.publishes or parameter.dtype is not torch.float32

    @property
    def free_buffers(self) -> int:
        """Buffers that nobody has taken."""
        return len(self.disk.buffers._free) + len(self.disk.buffers._fresh)

    def close(self) -> None:
        self.due.close()
        self.disk.close()

    def step(self, step: int, skipped: Sequence[int] = ()) -> None:
        """One whole step."""
        self.begin(step, skipped)
        self.finish()

    def begin(self, step: int, skipped: Sequence[int] = ()) -> None:
        """Backward, then updates of all units, in a thread if they are lazy."""
        taken = self._backward(step, skipped)
        due: dict[Unit, list[DueUpdate]] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter in taken:
                update = DueUpdate(
                    parameter,
                    taken[parameter],
                    numbers_of(step, index),
                    parameter.detach(),
                    self.publishes,
                )
                due.setdefault(Unit(str(index // 2)), []).append(update)
        self.states.begin(due, clip_of(step))
        for unit in due:
            self.due.add(unit, lambda unit=unit: self._update(unit))  # type: ignore[misc, arg-type]

    def _update(self, unit: Unit) -> None:
        self.arrivals += self.states.update(unit)

    def _backward(self, step: int, skipped: Sequence[int]) -> Mapping[nn.Parameter, object]:
        gradients = gradients_of(step, self.parameters)
        present = [i for i in range(len(gradients)) if i not in skipped]
        if self.gradients is None:
            return {self.parameters[i]: gradients[i] for i in present}
        backward([self.parameters[i] for i in present], [gradients[i] for i in present])
        taken = self.gradients.take()
        self.gradients.clear()
        return taken

    def finish(self) -> None:
        """The updates are done and have arrived."""
        self.due.drain()
        self.states.finish()
        for arrival in self.arrivals:
            arrival.wait()
        self.arrivals.clear()


def backward(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    """Have autograd accumulate just these gradients, of which it may take the memory."""
    torch.autograd.backward([p.view_as(p) for p in parameters], [g.clone() for g in gradients])


def assert_same(disk: OnDisk, resident: Resident) -> None:
    """Bit for bit, parameters and states."""
    for index, (found, wanted) in enumerate(zip(disk.parameters, resident.parameters, strict=True)):
        assert torch.equal(found, wanted), f"parameter {index}"
        states = disk.states.state(found)
        for name, state in resident.states[index].items():
            if name == "master" and not (disk.publishes or found.dtype is not torch.float32):
                assert name not in states
                continue
            assert torch.equal(states[name].view(-1), state.view(-1)), (index, name)
        for dtype, name in REMAINDERS.items():
            assert name not in states or states[name].dtype is dtype
