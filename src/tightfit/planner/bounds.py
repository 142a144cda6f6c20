"""What a candidate takes at least, from closed forms and from what was priced before.

A dry run takes a second, so most candidates are turned down without one. Model states are closed
forms, and so is what a loss cannot do without. What a micro-batch of m sequences leaves for
backward, with the scratch of the operations at that moment, grows with m along a line that starts
at or above zero: one of k sequences takes k/m of it at least, and a larger one as much. What layers
leave does not depend on the loss. Activations count on the tier where they wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun
from tightfit.planner.fractions import state_bytes
from tightfit.policies import (
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    Policies,
    Tier,
)

_HOST = (Tier.HOST, Tier.PINNED)
_OF_THE_BATCH = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.TEMPORARIES)
_FP32_BYTES = 4
_Layers = tuple[CheckpointingPolicy, AdapterPolicy | None]  # decides what layers leave


@dataclass(frozen=True)
class _Seen:
    """The kinds of a batch at one moment, and the micro-batch that they are of.

    Attributes:
        kinds: on the device.
        of_layers: of the activations there, what certainly is not the loss's own; 0 in backward,
            where a layer's are made again that the loss did not see.
        host_bytes: of activations that had left it.
    """

    loss: LossPolicy
    sequences: int
    kinds: dict[Kind, int]
    of_layers: int
    host_bytes: int

    def least_bytes(self, sequences: int, *, activations_stay: bool) -> int:
        """What another micro-batch takes at the same moment, at least."""
        kinds = dict(self.kinds)
        if not activations_stay:
            kinds.pop(Kind.ACTIVATIONS, None)
        return int(sum(kinds.values()) * self._share(sequences))

    def least_of_layers(self, sequences: int) -> int:
        """The same of what layers leave, whatever the loss."""
        return int(self.of_layers * self._share(sequences))

    def least_host_bytes(self, sequences: int) -> int:
        """The same of activations that leave."""
        return int(self.host_bytes * self._share(sequences))

    def _share(self, sequences: int) -> float:
        return min(1.0, sequences / self.sequences)


@dataclass
class LowerBounds:
    """Learns from every bill that is worked out.

    Attributes:
        sequence_length: tokens of the longest sequence.
    """

    sequence_length: int
    _seen: dict[_Layers, list[_Seen]] = field(default_factory=lambda: defaultdict(list))

    def learn(self, policies: Policies, run: DryRun) -> None:
        """Take a dry run in."""
        own = self._at_most_of_the_loss(policies, run)
        forward = run.table.peaks.get(Phase.FORWARD, {}).get(Tier.DEVICE, {})
        of_layers = max(0, forward.get(Kind.ACTIVATIONS, 0) - own)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tiers = run.table.peaks.get(phase, {})
            device = tiers.get(Tier.DEVICE, {})
            away = (tiers.get(tier, {}).get(Kind.ACTIVATIONS, 0) for tier in _HOST)
            self._seen[_layers(policies)].append(
                _Seen(
                    policies.loss,
                    policies.batch.micro_batch_size,
                    {kind: device.get(kind, 0) for kind in _OF_THE_BATCH},
                    of_layers if phase is Phase.FORWARD else 0,
                    sum(away),
                )
            )

    def states(self, policies: Policies, run: DryRun) -> MemoryTable:
        """Model states alone, whatever the batch: gradients count where they are kept for long.

        Args:
            run: of the same model and adapter.
        """
        tiers = state_bytes(run, policies)
        tiers[Tier.DEVICE].pop(Kind.GRADIENTS, None)
        return MemoryTable({Phase.STEP: tiers})

    def table(self, policies: Policies, run: DryRun) -> MemoryTable:
        """States and what the batch takes at least.

        Args:
            run: of the same model and adapter.
        """
        least = self.states(policies, run)
        stay = policies.placement.activations is Tier.DEVICE
        sequences = policies.batch.micro_batch_size
        seen = self._seen[_layers(policies)]
        same_loss = [one for one in seen if one.loss == policies.loss]
        measured = _most(one.least_bytes(sequences, activations_stay=stay) for one in same_loss)
        of_layers = self._least_of_layers(policies, run) if stay else 0
        least_bytes = max(measured, of_layers + self._least_of_the_loss(policies, run))
        least = least.plus(Tier.DEVICE, Kind.ACTIVATIONS, least_bytes)
        if stay:
            return least
        host = _most(one.least_host_bytes(sequences) for one in same_loss)
        return least.plus(Tier.HOST, Kind.ACTIVATIONS, host)

    def _least_of_layers(self, policies: Policies, run: DryRun) -> int:
        """What layers leave when the loss begins: as seen with any loss, or their inputs alone."""
        width = policies.precision.parameter_bytes
        inputs = run.shape.layers * self._tokens(policies) * run.shape.hidden_size * width
        sequences = policies.batch.micro_batch_size
        seen = (one.least_of_layers(sequences) for one in self._seen[_layers(policies)])
        return max(inputs, _most(seen))

    def _least_of_the_loss(self, policies: Policies, run: DryRun) -> int:
        """What a loss holds beside all that layers left: logits and their logarithms in fp32, or in
        chunks the fp32 gradient of an output layer that is trained."""
        vocabulary, kind = run.shape.vocab_size, policies.loss.kind
        if kind is LossKind.FULL:
            return 2 * _FP32_BYTES * self._tokens(policies) * vocabulary
        if kind is LossKind.CHUNKED and policies.adapter is None:
            return _FP32_BYTES * vocabulary * run.shape.hidden_size
        return 0

    def _at_most_of_the_loss(self, policies: Policies, run: DryRun) -> int:
        """Activations that a loss keeps: two in fp32 of all logits, or of the hidden states."""
        full = policies.loss.kind is LossKind.FULL
        width = run.shape.vocab_size if full else run.shape.hidden_size
        return 2 * _FP32_BYTES * self._tokens(policies) * width

    def _tokens(self, policies: Policies) -> int:
        return policies.batch.micro_batch_size * self.sequence_length


def _layers(policies: Policies) -> _Layers:
    return policies.checkpointing, policies.adapter


def _most(counts: Iterable[int]) -> int:
    return max(counts, default=0)
