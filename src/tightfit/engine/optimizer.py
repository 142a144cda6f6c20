"""The optimizer whose states live on the tiers that a plan names, with exact clipping.

`step` fixes the norm of all gradients and the factor that clips them, then every unit of the model
is updated on the tier of its states: those on the device at once, others in the order of forward,
now or while the next forward runs. The numbers are those of `clip_grad_norm_` followed by the plain
optimizer. Where an update cannot run on the parameter itself (16 bits wide, or on another tier),
an fp32 master lives with the states. Knows how nothing is computed (`rules.py`) and nothing of how
gradients got where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.arithmetic import Numbers
from tightfit.engine.clipping import Clip, Gradients
from tightfit.engine.disk_gradients import DiskGradient
from tightfit.engine.disk_states import DiskStates, DueUpdate
from tightfit.engine.disk_updates import DiskUpdates
from tightfit.engine.elsewhere import Elsewhere
from tightfit.engine.lazy import DueUpdates
from tightfit.engine.parameter_groups import (
    check_halves_are_together,
    check_same_parameters,
    decay_groups,
    owned,
)
from tightfit.engine.ranks import Ranks
from tightfit.engine.rule_of import rule_of
from tightfit.engine.rules import CHUNK_VALUES, Piece, Rule, Scratch
from tightfit.engine.slab import Reserved
from tightfit.engine.streaming import ParameterStream
from tightfit.engine.transfer import Arrival
from tightfit.engine.units import Unit
from tightfit.ledger import local_part
from tightfit.policies import Policies, Tier

_ALL_WRITTEN = Unit("", (), (), is_layer=False)  # no forward waits for it
_CHUNK_VALUES_ON_A_CARD = 2**24  # enough work for a kernel, little memory


@dataclass
class _Update:
    """What is due for one parameter: its piece, and where the result goes from there.

    Attributes:
        piece: without values where those are on the disk.
        publish: the parameter on the device and what is copied into it; None where the update has
            written the parameter itself.
    """

    parameter: nn.Parameter
    piece: Piece
    numbers: Numbers
    publish: tuple[torch.Tensor, torch.Tensor] | None


class PlacedOptimizer(torch.optim.Optimizer):
    """An optimizer on several tiers; learning-rate schedulers of torch and transformers take it.

    States are made by `create_states`, in place on their tier, so that the first step needs no more
    memory than the others. Of a parameter that ranks share, each rank has the states of its part.

    Args:
        units: all units of the model.
        policies: the optimizer, and where gradients are, are read.
        tiers: of the states, for each parameter that is trained, in the order of the model's.
        elsewhere: has not been allocated.
        stream: has the values of parameters that do not live on the device.
        due: does updates off the device.

    Attributes:
        written_bytes: what the last step that was finished has written to the disk, its gradients
            included: it wears the disk off.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        policies: Policies,
        tiers: Mapping[nn.Parameter, Tier],
        elsewhere: Elsewhere,
        stream: ParameterStream | None,
        ranks: Ranks,
        due: DueUpdates,
    ) -> None:
        policy = policies.optimizer
        self._own = owned(units)
        self._tiers = tiers
        self._elsewhere = elsewhere
        self._stream = stream
        self._transfer = elsewhere.transfer
        self._ranks = ranks
        self._due = due
        self._rule: Rule = rule_of(policy)
        self._splits_master = policy.split_master
        self._max_grad_norm = policy.max_grad_norm
        self._published: dict[Unit, list[Arrival]] = {}
        self._scratch: dict[Tier, Scratch] = {}
        super().__init__(
            decay_groups(tiers, policy.weight_decay),
            {"lr": policy.learning_rate, "betas": policy.betas, "eps": policy.epsilon},
        )
        if self._splits_master:
            check_halves_are_together([p for p in tiers if self._publishes(p)], tiers)
        # A master that is copied to the device as it is; of 16 bits the spent gradient travels.
        self._travelling: dict[nn.Parameter, Reserved] = {
            parameter: elsewhere.slab.reserve(
                local_part(parameter).shape, torch.float32, Kind.MASTER_WEIGHTS
            )
            for parameter, tier in tiers.items()
            if tier is Tier.HOST and parameter.dtype is torch.float32 and self._publishes(parameter)
        }
        self._disk = self._states_on_disk(reads_gradients=policies.placement.gradients is Tier.NVME)
        self._passing = self._values_on_disk()
        self._written_before = 0
        self.written_bytes = 0

    def _states_on_disk(self, *, reads_gradients: bool) -> DiskStates | None:
        """The states that live there, and what is updated with them."""
        parameters = [p for own in self._own.values() for p in own if self._is_on_disk(p)]
        if not parameters:
            return None
        transfer, slab, disk = self._transfer, self._elsewhere.slab, self._elsewhere.disk
        assert disk is not None
        needs_master = partial(self._needs_master, tier=Tier.NVME)
        states = DiskStates(
            parameters,
            self._rule,
            needs_master,
            transfer,
            slab,
            disk,
            reads_gradients=reads_gradients,
        )
        if self._stream is not None and self._stream.on_disk is not None:
            states.update_on_disk(self._stream.on_disk)
        return states

    def _values_on_disk(self) -> DiskUpdates | None:
        """The parameters that live there while their states are on the host."""
        values = None if self._stream is None else self._stream.on_disk
        disk = self._elsewhere.disk
        if values is None or disk is None:
            return None
        parameters = [p for p, t in self._tiers.items() if t is Tier.HOST and values.has(p)]
        return DiskUpdates(parameters, values, disk) if parameters else None

    @property
    def device(self) -> torch.device:
        """Where parameters compute."""
        return self._transfer.device

    def _publishes(self, parameter: nn.Parameter) -> bool:
        """Whether an update that runs off the device has to be copied to it."""
        return self._stream is None or not self._stream.has(parameter)

    @torch.no_grad()
    def create_states(self) -> None:
        """Make all states; parameters have their values, and the slab its memory."""
        for parameter, tier in self._tiers.items():
            if tier is not Tier.NVME:
                self.state[parameter] = self._initial_state(parameter, tier)
        for tier in set(self._tiers.values()) - {Tier.NVME}:
            self._scratch[tier] = self._make_scratch(tier)
        if self._disk is not None:
            self._disk.create(self._values)
        self._written_before = self._all_written_bytes()

    def _make_scratch(self, tier: Tier) -> Scratch:
        """What updates on `tier` work in, made once: they run in a thread that no ledger sees."""
        parameters = [p for p, its_tier in self._tiers.items() if its_tier is tier]
        largest = max(local_part(parameter).numel() for parameter in parameters)
        narrow = [p.dtype for p in parameters if p.dtype is not torch.float32]
        gradient_type = narrow[0] if narrow else torch.float32
        device = self._device_of(tier)
        # A dry run for a card has no card, but its host memory is said to be locked.
        on_card = tier is Tier.DEVICE and self._transfer.host_tier is Tier.PINNED
        chunk = _CHUNK_VALUES_ON_A_CARD if on_card else CHUNK_VALUES
        count = self._rule.scratch_values(largest, gradient_type, chunk)
        with ledger.labelled(Kind.BUFFERS, tier):
            memory = torch.empty(count, dtype=torch.float32, device=device)
            return self._rule.scratch(memory, gradient_type)

    def _device_of(self, tier: Tier) -> torch.device:
        return self._transfer.device if tier is Tier.DEVICE else torch.device("cpu")

    def _values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where the parameter's values are now, of this rank's part."""
        on_host = None if self._stream is None else self._stream.host_values(parameter)
        return local_part(parameter).detach() if on_host is None else on_host

    def _initial_state(self, parameter: nn.Parameter, tier: Tier) -> dict[str, torch.Tensor]:
        values, device = self._values(parameter), self._device_of(tier)
        state: dict[str, torch.Tensor] = {}
        if self._needs_master(parameter, tier):
            state["master"] = self._master(parameter, values, tier)
        with ledger.labelled(Kind.OPTIMIZER_STATES, tier):
            if self._rule.counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name, (elements, dtype) in self._rule.states(values.shape).items():
                shape = values.shape if elements == values.numel() else (elements,)
                state[name] = torch.empty(shape, dtype=dtype, device=device)
        self._rule.initialise({name: state[name] for name in self._rule.states(values.shape)})
        return state

    def _needs_master(self, parameter: nn.Parameter, tier: Tier) -> bool:
        if parameter.dtype is not torch.float32:
            return not self._splits_master
        return tier is not Tier.DEVICE and self._publishes(parameter)

    def _master(self, parameter: nn.Parameter, values: torch.Tensor, tier: Tier) -> torch.Tensor:
        if parameter in self._travelling:
            master = self._travelling[parameter].tensor
            self._transfer.copy(master, values).wait()
            return master
        with ledger.labelled(Kind.MASTER_WEIGHTS, tier):
            if not self._passes(parameter):
                return values.to(self._device_of(tier), torch.float32)
            master = torch.empty(values.shape, dtype=torch.float32)
        assert self._stream is not None
        assert self._stream.on_disk is not None
        self._stream.on_disk.read_into(parameter, master)
        return master

    def _passes(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's values come from the disk to be updated on the host."""
        return self._passing is not None and self._passing.has(parameter)

    # A step

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        gradients: Gradients,
        norms: Mapping[nn.Parameter, torch.Tensor] | None = None,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Clip and apply `gradients`, which are consumed; returns their global norm before it.

        Args:
            gradients: by parameter, this rank's part, on the tier of its states or nearer, in the
                order of `model.parameters()`. Parameters without one are left as they are.
            norms: of those that are known already, fp32 scalars; of those on the disk.
            scale: what all of them were multiplied by; the norm that is returned is without it.

        A norm that is not finite leaves parameters and states untouched.
        """
        self.drain()
        with ledger.labelled(Kind.TEMPORARIES):
            norm = self._ranks.global_norm(gradients, norms or {})
            if scale != 1.0:
                norm /= scale
        if not bool(torch.isfinite(norm)):
            return norm
        clip = Clip(norm, self._max_grad_norm, self._transfer.device, scale)
        numbers = self._numbers()
        on = {tier: [p for p in gradients if self._tiers[p] is tier] for tier in Tier}
        self._count([*on[Tier.DEVICE], *on[Tier.HOST]])
        updates = {p: self._update(p, gradients[p], numbers[p]) for p in on[Tier.DEVICE]}
        self._update_on_device(list(updates.values()), clip)
        updates = {p: self._update(p, gradients[p], numbers[p]) for p in on[Tier.HOST]}
        from_disk = self._due_on_disk(on[Tier.NVME], gradients, numbers)
        on_host = {
            unit: [updates[p] for p in own if p in updates] for unit, own in self._own.items()
        }
        if self._disk is not None:
            self._disk.begin(from_disk, clip.on(Tier.NVME))
        if self._passing is not None:
            every = [update for due in on_host.values() for update in due]
            self._passing.begin({u.parameter: u.piece for u in every if self._passes(u.parameter)})
        for unit, due in on_host.items():
            if due or unit in from_disk:
                self._due.add(unit, partial(self._update_unit, unit, due, clip))
        if self._elsewhere.disk is not None:
            self._due.add(_ALL_WRITTEN, self._end_on_disk)
        return norm

    def _end_on_disk(self) -> None:
        """All updates of a step are on their way to the disk: it is over when they are there."""
        for part in (self._disk, self._passing):
            if part is not None:
                part.finish()
        written_bytes = self._all_written_bytes()
        self.written_bytes = written_bytes - self._written_before
        self._written_before = written_bytes

    def _all_written_bytes(self) -> int:
        disk = self._elsewhere.disk
        return 0 if disk is None else disk.written_bytes

    def _due_on_disk(
        self,
        parameters: Collection[nn.Parameter],
        gradients: Gradients,
        numbers: Mapping[nn.Parameter, Numbers],
    ) -> dict[Hashable, Sequence[DueUpdate]]:
        on_disk = set(parameters)
        due = {
            unit: [
                DueUpdate(p, gradients[p], numbers[p], self._values(p), self._publishes(p))
                for p in own
                if p in on_disk
            ]
            for unit, own in self._own.items()
        }
        return {unit: updates for unit, updates in due.items() if updates}

    def _numbers(self) -> dict[nn.Parameter, Numbers]:
        """Each parameter's, as they are now: a schedule goes on while updates wait."""
        return {
            parameter: numbers
            for group in self.param_groups
            for numbers in [
                Numbers(float(group["lr"]), group["weight_decay"], group["betas"], group["eps"])
            ]
            for parameter in group["params"]
        }

    def _count(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._rule.counts_steps and parameters:
            torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)

    def _update(
        self, parameter: nn.Parameter, gradient: torch.Tensor | DiskGradient, numbers: Numbers
    ) -> _Update:
        """What is due for one parameter."""
        assert isinstance(gradient, torch.Tensor), "only states on the disk have gradients there"
        state, values = self.state[parameter], self._values(parameter)
        on_device = self._tiers[parameter] is Tier.DEVICE
        publishes = not on_device and self._publishes(parameter)
        weight, narrow = state.get("master"), None
        if not self._passes(parameter):
            if weight is None and not self._splits_master:
                weight = values
            if parameter.dtype is not torch.float32:
                narrow = gradient if publishes else values
        piece = Piece(
            None if weight is None else weight.view(-1),
            gradient.view(-1),
            {name: state[name].view(-1) for name in self._rule.states(values.shape)},
            state.get("step"),
            None if narrow is None else narrow.view(-1),
        )
        if not publishes:
            return _Update(parameter, piece, numbers, None)
        source = narrow if narrow is not None else weight
        assert source is not None
        return _Update(parameter, piece, numbers, (values, source))

    def _update_unit(self, unit: Unit, updates: list[_Update], clip: Clip) -> None:
        """Update one unit off the device and send what has changed there."""
        arrivals = self._published.setdefault(unit, [])
        for update in updates:
            apply = partial(self._apply_piece, update, clip)
            if self._passing is not None and self._passes(update.parameter):
                self._passing.update(update.parameter, apply)
            else:
                apply(update.piece)
            if update.publish is not None:
                # Nothing on the device reads the parameter any more: its gradient has arrived here.
                arrivals.append(self._transfer.copy(*update.publish, ordered=False))
        if self._disk is not None:
            arrivals += self._disk.update(unit)

    def _apply_piece(self, update: _Update, clip: Clip, piece: Piece) -> None:
        """Update a parameter, or a run of it, on the host."""
        scratch = self._scratch[Tier.HOST]
        self._rule.update([piece], update.numbers, clip.on(Tier.HOST), scratch)

    def _update_on_device(self, updates: list[_Update], clip: Clip) -> None:
        """Update pieces that have the same numbers together."""
        together: dict[Numbers, list[Piece]] = {}
        for update in updates:
            together.setdefault(update.numbers, []).append(update.piece)
        for numbers, pieces in together.items():
            scratch = self._scratch[Tier.DEVICE]
            self._rule.update(pieces, numbers, clip.on(Tier.DEVICE), scratch)

    # What is on its way

    def is_final(self, unit: Unit) -> bool:
        """Whether the unit's parameters have what the last step gave them, or will in order."""
        return self._due.is_done(unit)

    def ready(self, unit: Unit) -> None:
        """Have forward come to `unit` only when it has its new values."""
        self._due.wait(unit)
        for arrival in self._published.pop(unit, ()):
            arrival.order()

    def drain(self) -> None:
        """Return when every update is done and has arrived."""
        self._due.drain()
        for arrivals in self._published.values():
            for arrival in arrivals:
                arrival.wait()
        self._published.clear()

    # Saved states

    def states_of(self, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        """The parameter's states by name, of this rank's part; a master that its own type or tier
        made necessary is `master`. Drain first."""
        if self._is_on_disk(parameter):
            assert self._disk is not None
            return self._disk.state(parameter)
        states: dict[str, torch.Tensor] = self.state.get(parameter, {})
        return states

    def state_entries(self, parameter: nn.Parameter) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Types and shapes of `states_of`, which are not read for it."""
        if self._is_on_disk(parameter):
            assert self._disk is not None
            return self._disk.entries(parameter)
        return {name: (t.dtype, t.shape) for name, t in self.states_of(parameter).items()}

    @torch.no_grad()
    def load_states(self, parameter: nn.Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states into those of a parameter; those that are not among them stay."""
        if self._is_on_disk(parameter):
            assert self._disk is not None
            self._disk.load(parameter, states)
            return
        for name, tensor in self.state[parameter].items():
            if name in states:
                tensor.copy_(states[name])

    def _is_on_disk(self, parameter: nn.Parameter) -> bool:
        return self._tiers.get(parameter) is Tier.NVME

    def state_dict(self) -> dict[str, Any]:
        """torch's, when all updates are done; what is on the disk is read."""
        self.drain()
        found = super().state_dict()
        for group, packed in zip(self.param_groups, found["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                if self._is_on_disk(parameter):
                    found["state"][number] = dict(self.states_of(parameter))
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved states into those that are here, so that each keeps its tier and its type.

        torch's own would give all of them the device and the type of their parameter. Load the
        model first: a master that was not saved, as no other tier or type needed one, is its
        parameter.

        Raises:
            ConfigError: they are the states of other parameters or of another optimizer.
        """
        self.drain()
        groups = state_dict["param_groups"]
        check_same_parameters(self.param_groups, self.state_entries, groups, state_dict["state"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                values = {"master": self._values(parameter), **state_dict["state"][number]}
                self.load_states(parameter, values)
            group.update({key: value for key, value in saved.items() if key != "params"})

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over parameters that were loaded from outside, where the master has their type.

        A wider master is part of a checkpoint itself and stays.
        """
        for parameter in self._tiers:
            dtype, _ = self.state_entries(parameter).get("master", (None, None))
            if dtype is parameter.dtype:
                self.load_states(parameter, {"master": self._values(parameter)})
