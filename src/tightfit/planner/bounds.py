"""What a candidate takes at least, from closed forms and from what was priced before.

A dry run takes seconds, so most candidates are turned down without one. Model states are closed
forms, and so are what a loss cannot do without and the parameters that visit the device, of which
a layer or an end is there at a time, or as many as were seen at some moment of a run in which they
were placed alike. What loading, starting and saving take does not depend on the
batch at all. What a micro-batch of m sequences leaves for
backward, with the scratch of the operations at that moment, grows with m along a line that starts
at or above zero: one of k sequences takes k/m of it at least, and a larger one as much. What layers
leave does not depend on the loss, and is no less where fewer of them are computed again.
Activations count on the tier where they wait.
However data-parallel ranks share states out, each leaves as much; n tensor ranks leave a part of n
at least, and more once two sizes of their groups were seen; a stage of a pipeline what
`stage_bounds.py` says. `likely` is no bound: it says what a bill will be near to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from tightfit.bill.model_states import state_widths
from tightfit.bill.on_disk import SLOTS
from tightfit.bill.table import Kind, Kinds, MemoryTable, Phase
from tightfit.dry_run import DryRun
from tightfit.planner.fractions import share_leaving, state_bytes
from tightfit.planner.seen import Seen
from tightfit.planner.stage_bounds import (
    SeenStage,
    StageBound,
    is_uncut,
    parameters_of_parts,
    uncut,
)
from tightfit.policies import (
    SMALLEST_LEAVING_BYTES,
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    Policies,
    QuantisationPolicy,
    Tier,
)

_HOST = (Tier.HOST, Tier.PINNED)
_OF_THE_BATCH = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.TEMPORARIES)
_FP32_BYTES = 4
_STAYING = (
    Kind.PARAMETERS,
    Kind.GRADIENTS,
    Kind.MASTER_WEIGHTS,
    Kind.OPTIMIZER_STATES,
    Kind.BUFFERS,
)
_CAUTION = 0.9  # of what is taken from differences, and not seen itself
_LARGE = 64  # times the smallest tensor that leaves, beside which smaller ones do not count
# Decides what layers leave for backward.
_Layers = tuple[CheckpointingPolicy, AdapterPolicy | None, QuantisationPolicy | None]


@dataclass
class LowerBounds:
    """Learns from every bill that is worked out.

    Attributes:
        sequence_length: tokens of the longest sequence.
    """

    sequence_length: int
    _seen: dict[_Layers, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    _stages: dict[_Layers, list[SeenStage]] = field(default_factory=lambda: defaultdict(list))
    _beside: dict[Hashable, dict[Tier, Kinds]] = field(default_factory=dict)

    def learn(self, policies: Policies, run: DryRun) -> None:
        """Take a dry run in."""
        for phase, key in _beside_training(policies).items():
            tiers = run.table.peaks.get(phase, {})
            self._beside[key] = {tier: _fixed(kinds) for tier, kinds in tiers.items()}
        own = self._at_most_of_the_loss(policies, run)
        forward = run.table.peaks.get(Phase.FORWARD, {}).get(Tier.DEVICE, {})
        staged = policies.sharding.pipeline_parallel > 1
        of_layers = 0 if staged else max(0, forward.get(Kind.ACTIVATIONS, 0) - own)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tiers = run.table.peaks.get(phase, {})
            device = tiers.get(Tier.DEVICE, {})
            away = (tiers.get(tier, {}).get(Kind.ACTIVATIONS, 0) for tier in _HOST)
            self._seen[_layers(policies)].append(
                Seen(
                    policies.loss,
                    policies.sharding,
                    policies.placement,
                    policies.batch.micro_batch_size,
                    {kind: device.get(kind, 0) for kind in _OF_THE_BATCH},
                    of_layers if phase is Phase.FORWARD else 0,
                    sum(away),
                    device.get(Kind.PARAMETERS, 0),
                    device.get(Kind.COLLECTIVES, 0),
                    device.get(Kind.ALLOCATOR, 0),
                )
            )
        self._stages[_layers(policies)].extend(_seen_stages(policies, run))

    def states(self, policies: Policies, run: DryRun) -> MemoryTable:
        """Model states alone, whatever the batch: gradients count in the step, where all are there,
        and earlier where they are kept from one micro-batch to the next.

        Args:
            run: of the same model and adapter.
        """
        tiers = state_bytes(run, policies)
        for kind, count in tiers[Tier.NVME].items():
            if kind is not Kind.GRADIENTS and (kind is not Kind.PARAMETERS or not run.frozen):
                tiers[Tier.NVME][kind] = SLOTS * count
        earlier = {tier: dict(kinds) for tier, kinds in tiers.items()}
        if policies.batch.accumulation_steps == 1:
            earlier[Tier.DEVICE].pop(Kind.GRADIENTS, None)
        return MemoryTable({Phase.FORWARD: earlier, Phase.STEP: tiers})

    def table(self, policies: Policies, run: DryRun) -> MemoryTable:
        """States and what the batch takes at least.

        Args:
            run: of the same model and adapter.
        """
        least = self.states(policies, run)
        stay = policies.placement.activations is Tier.DEVICE
        states = least.peaks[Phase.FORWARD][Tier.DEVICE]
        whole = _gathered(policies, run)
        device = self._least_on_device(policies, run, states, whole, stay=stay)
        least = least.plus(Tier.DEVICE, Kind.ACTIVATIONS, device, Phase.FORWARD)
        least = least.plus(Tier.DEVICE, Kind.COLLECTIVES, whole, Phase.FORWARD)
        if not stay and not is_uncut(policies):
            host = _most(one.least_host_bytes(policies) for one in self._of_same_loss(policies))
            host = max(host, self._least_away(policies, run))
            least = least.plus(Tier.HOST, Kind.ACTIVATIONS, host, Phase.FORWARD)
        return self._with_the_rest(policies, least)

    def likely(self, policies: Policies, run: DryRun) -> MemoryTable | None:
        """What they will take, no bound: it may be a little more or less. None where nothing near
        to them was seen.

        Args:
            run: of the same model and adapter.
        """
        near = [one for one in self._of_same_loss(policies) if one.is_near(policies)]
        if not near or policies.sharding.pipeline_parallel > 1:
            return None
        nearest = min(near, key=lambda one: one.sequences)
        wasted = nearest.likely_allocator_bytes(policies)
        return self.table(policies, run).plus(Tier.DEVICE, Kind.ALLOCATOR, wasted)

    def _least_on_device(
        self, policies: Policies, run: DryRun, states: Kinds, gathered: int, *, stay: bool
    ) -> int:
        """What comes to the `states` of an average stage, and to what it has gathered, in forward
        or backward."""
        layer, end = _visiting(policies, run)
        of_layers = self._least_of_layers(policies, run) if stay else 0
        if policies.sharding.pipeline_parallel > 1:
            seen = tuple(one for one in self._stages[_layers(policies)] if one.is_of(policies))
            average = sum(states.values()) + gathered
            return StageBound(policies, run, average, of_layers, seen, stay).beyond_average()
        measured = _most(
            one.least_bytes(policies, states.get(Kind.PARAMETERS, 0), gathered)
            for one in self._of_same_loss(policies)
        )
        of_the_loss = self._least_of_the_loss(policies, run)
        return max(measured, layer, end + of_layers + of_the_loss)

    def _of_same_loss(self, policies: Policies) -> Iterator[Seen]:
        """What was seen with the same loss on ranks that divide the model alike."""
        for one in self._seen[_layers(policies)]:
            if (one.loss, one.sharding) == (policies.loss, policies.sharding):
                yield one

    def whatever_the_batch(self, policies: Policies, run: DryRun) -> MemoryTable:
        """States, what visits the device, and what was seen beside training.

        Args:
            run: of the same model and adapter.
        """
        visiting = max(_visiting(policies, run))
        states = self.states(policies, run)
        states = states.plus(Tier.DEVICE, Kind.PARAMETERS, visiting, Phase.FORWARD)
        return self._with_the_rest(policies, states)

    def _with_the_rest(self, policies: Policies, step: MemoryTable) -> MemoryTable:
        keys = {} if is_uncut(policies) else _beside_training(policies)
        beside = {phase: self._beside[key] for phase, key in keys.items() if key in self._beside}
        return MemoryTable({**step.peaks, **beside})

    def _least_of_layers(self, policies: Policies, run: DryRun) -> int:
        """What all layers of one micro-batch leave when the loss begins: as seen with any loss, or
        their inputs alone, of which tensor ranks have all."""
        width = policies.precision.parameter_bytes
        inputs = run.shape.layers * self._tokens(policies) * run.shape.hidden_size * width
        most = inputs
        for key, share in _leaving_less(policies, run):
            replicated = self._replicated_bytes(key)
            seen = _most(one.least_of_layers(policies, replicated) for one in self._seen[key])
            most = max(most, int(seen * share))
        return most

    def _replicated_bytes(self, key: _Layers) -> float:
        """Of what layers leave of a sequence, the part that each tensor rank has: t ranks have
        t times it and the rest once. 0 until two sizes of tensor groups were seen."""
        left: dict[int, float] = {}
        for one in self._seen[key]:
            ranks = one.sharding.tensor_parallel
            left[ranks] = max(left.get(ranks, 0.0), one.of_layers / one.sequences)
        if len(left) < 2:
            return 0.0
        (few, most), (many, least) = min(left.items()), max(left.items())
        return _CAUTION * max(0.0, (many * least - few * most) / (many - few))

    def _least_away(self, policies: Policies, run: DryRun) -> int:
        """What layers leave that leaves the device (`engine/activations.py`): all but that of the
        last ones, and tensors too small for it."""
        sharding, layers = policies.sharding, run.shape.layers
        hidden = self._tokens(policies) * run.shape.hidden_size * policies.precision.parameter_bytes
        if sharding.pipeline_parallel > 1 or hidden < _LARGE * SMALLEST_LEAVING_BYTES:
            return 0
        leaving = max(0, layers - 1 - policies.placement.prefetch) / layers
        return int(_CAUTION * leaving * self._least_of_layers(policies, run))

    def _least_of_the_loss(self, policies: Policies, run: DryRun) -> int:
        """What a loss holds beside all that layers left: logits and their logarithms in fp32, or in
        chunks the fp32 gradient of an output layer that is trained."""
        vocabulary, kind = run.shape.vocab_size, policies.loss.kind
        if kind is LossKind.FULL:
            return 2 * _FP32_BYTES * self._tokens(policies) * vocabulary
        if kind is LossKind.CHUNKED and policies.adapter is None:
            head = _FP32_BYTES * vocabulary * run.shape.hidden_size
            return head // policies.sharding.tensor_parallel
        return 0

    def _at_most_of_the_loss(self, policies: Policies, run: DryRun) -> int:
        """Activations that a loss keeps: two in fp32 of all logits, or of the hidden states."""
        full = policies.loss.kind is LossKind.FULL
        width = run.shape.vocab_size if full else run.shape.hidden_size
        return 2 * _FP32_BYTES * self._tokens(policies) * width

    def _tokens(self, policies: Policies) -> int:
        return policies.batch.micro_batch_size * self.sequence_length


def _visiting(policies: Policies, run: DryRun) -> tuple[int, int]:
    """Parameters that live elsewhere and are on the device at a time: those of a layer at its turn,
    and those of the output layer while the loss is made."""
    placement = policies.placement
    if placement.parameters is Tier.DEVICE or policies.sharding.ranks > 1:
        return 0, 0  # of what ranks share it is a part, which is not counted
    inside, end = parameters_of_parts(run)
    widths = state_widths(policies)
    width = min(widths.trainable, widths.frozen)
    leaves = share_leaving(placement.parameter_fraction, run, trained=False) == 1
    return width * inside, width * end if leaves else 0


def _gathered(policies: Policies, run: DryRun) -> int:
    """Whole parameters beside this rank's shards from the first layer's forward to its backward
    (the table in engine/sharding.py): all of an average stage, or in ZeRO-3 what is in no layer."""
    sharding, (_, end) = policies.sharding, parameters_of_parts(run)
    if sharding.shards == 1 or policies.adapter is not None:
        return 0
    count = run.trainable / sharding.pipeline_parallel
    if sharding.zero_stage == 3:
        ends = (1 if run.shape.tied else 2) * end
        count = ends if sharding.pipeline_parallel == 1 else 0
    return int(state_widths(policies).trainable * count / sharding.tensor_parallel)


def _seen_stages(policies: Policies, run: DryRun) -> Iterator[SeenStage]:
    """What each stage that was run had of the batch, without what states do."""
    stages = policies.sharding.pipeline_parallel
    for number, table in run.stages.items():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            device = table.peaks.get(phase, {}).get(Tier.DEVICE, {})
            yield SeenStage(
                policies.loss,
                uncut(policies.sharding),
                number,
                run.stage_layers[number::stages],
                policies.batch.micro_batch_size,
                device.get(Kind.LOGITS, 0) + device.get(Kind.TEMPORARIES, 0),
                device.get(Kind.ACTIVATIONS, 0),
            )


def _beside_training(policies: Policies) -> dict[Phase, Hashable]:
    """All that decides what is there before and after training, whatever the batch and the loss."""
    placement = policies.placement
    staying = (
        replace(placement, activations=Tier.DEVICE),
        policies.optimizer.name,
        policies.optimizer.master,
        policies.batch.accumulation_steps > 1,
        policies.adapter,
        policies.quantisation,
        policies.precision,
        policies.sharding,
    )
    phases = (Phase.LOAD, Phase.INIT, Phase.RESUME, Phase.SAVE)
    return {phase: (phase, staying) for phase in phases}


def _fixed(kinds: Kinds) -> Kinds:
    """What is not of a batch, nor made for what passes through."""
    return {kind: count for kind, count in kinds.items() if kind in _STAYING}


def _layers(policies: Policies) -> _Layers:
    return policies.checkpointing, policies.adapter, policies.quantisation


def _leaving_less(policies: Policies, run: DryRun) -> Iterator[tuple[_Layers, float]]:
    """What decides what layers leave, where they leave no more than with `policies`, and the part
    of it that is certain: of layers that are alike and not computed again each leaves as much as
    the others."""
    own, adapter, base = _layers(policies)
    every_layer = CheckpointingPolicy(enabled=True)
    yield _layers(policies), 1.0
    if own != every_layer:
        yield (every_layer, adapter, base), 1.0
    if own.enabled and run.shape.alike:
        again = -(-run.shape.layers // own.every)  # the first of every so many
        yield (CheckpointingPolicy(), adapter, base), 1 - again / run.shape.layers


def _most(counts: Iterable[int]) -> int:
    return max(counts, default=0)
