"""What a candidate takes at least, from closed forms and from what was priced before.

A dry run takes a second, so most candidates are turned down without one. Model states are closed
forms. What a micro-batch of m sequences leaves for backward, with the scratch of the operations at
that moment, grows with m along a line that starts at or above zero: one of k sequences takes k/m of
it at least, and a larger one as much. Activations count on the tier where they wait.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun
from tightfit.planner.fractions import state_bytes
from tightfit.policies import AdapterPolicy, CheckpointingPolicy, LossPolicy, Policies, Tier

_HOST = (Tier.HOST, Tier.PINNED)
_OF_THE_BATCH = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.TEMPORARIES)
_Shape = tuple[LossPolicy, CheckpointingPolicy, AdapterPolicy | None]


@dataclass(frozen=True)
class _Seen:
    """The kinds of a batch at one moment, and the micro-batch that they are of.

    Attributes:
        kinds: on the device.
        host_bytes: of activations that had left it.
    """

    sequences: int
    kinds: dict[Kind, int]
    host_bytes: int

    def least_bytes(self, sequences: int, *, activations_stay: bool) -> int:
        """What another micro-batch takes at the same moment, at least."""
        kinds = dict(self.kinds)
        if not activations_stay:
            kinds.pop(Kind.ACTIVATIONS, None)
        return int(sum(kinds.values()) * self._share(sequences))

    def least_host_bytes(self, sequences: int) -> int:
        """The same of activations that leave."""
        return int(self.host_bytes * self._share(sequences))

    def _share(self, sequences: int) -> float:
        return min(1.0, sequences / self.sequences)


@dataclass
class LowerBounds:
    """Learns from every bill that is worked out."""

    _seen: dict[_Shape, list[_Seen]] = field(default_factory=lambda: defaultdict(list))

    def learn(self, policies: Policies, table: MemoryTable) -> None:
        """Take a dry run's table in."""
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tiers = table.peaks.get(phase, {})
            device = tiers.get(Tier.DEVICE, {})
            away = (tiers.get(tier, {}).get(Kind.ACTIVATIONS, 0) for tier in _HOST)
            self._seen[_shape(policies)].append(
                _Seen(
                    policies.batch.micro_batch_size,
                    {kind: device.get(kind, 0) for kind in _OF_THE_BATCH},
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
        """States and what the batch takes at least."""
        least = self.states(policies, run)
        stay = policies.placement.activations is Tier.DEVICE
        sequences = policies.batch.micro_batch_size
        seen = self._seen[_shape(policies)]
        device = (one.least_bytes(sequences, activations_stay=stay) for one in seen)
        least = least.plus(Tier.DEVICE, Kind.ACTIVATIONS, max(device, default=0))
        if stay:
            return least
        host = (one.least_host_bytes(sequences) for one in seen)
        return least.plus(Tier.HOST, Kind.ACTIVATIONS, max(host, default=0))


def _shape(policies: Policies) -> _Shape:
    return policies.loss, policies.checkpointing, policies.adapter
