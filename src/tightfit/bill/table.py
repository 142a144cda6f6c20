"""The table of bytes by phase, tier and kind that a dry run predicts and a ledger measures.

For every phase and tier it holds the moment of the tier's highest total: what each kind took
then. Knows nothing of where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tightfit.policies import Tier


class Phase(StrEnum):
    """What a training run is doing, in the order of a run."""

    LOAD = "load"
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    EVAL = "eval"
    SAVE = "save"
    RESUME = "resume"


class Kind(StrEnum):
    """What bytes are for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER_WEIGHTS = "master weights"
    OPTIMIZER_STATES = "optimizer states"
    ACTIVATIONS = "activations"  # made in forward with gradients on: what backward will read
    LOGITS = "logits"
    TEMPORARIES = "temporaries"  # live within one operation or layer
    COLLECTIVES = "gather/reduce buffers"  # whole parameters and gradients between their shards
    BUFFERS = "buffers"  # the model's buffers and batches
    TRANSFER = "pinned and I/O buffers"  # landing places of copies and of disk reads and writes
    RUNTIME = "runtime"  # context, communication library, workspaces; known, not counted
    ALLOCATOR = "allocator"  # what the card's allocator rounds up and cannot hand out
    MARGIN = "margin"  # a bill's allowance for what a dry run cannot see; never measured


Kinds = Mapping[Kind, int]
MARGIN_SHARE = 0.01


@dataclass(frozen=True)
class MemoryTable:
    """`peaks[phase][tier][kind]` bytes at the moment of the tier's peak in that phase."""

    peaks: Mapping[Phase, Mapping[Tier, Kinds]]

    def phase_peak_bytes(self, phase: Phase, tier: Tier) -> int:
        """Highest total of `tier` during `phase`."""
        return sum(self.peaks.get(phase, {}).get(tier, {}).values())

    def peak_bytes(self, tier: Tier) -> int:
        """Highest total of `tier` over all phases."""
        return max((self.phase_peak_bytes(phase, tier) for phase in self.peaks), default=0)

    def peak_phase(self, tier: Tier) -> Phase | None:
        """The phase with the highest total of `tier`; None for an empty table."""
        phases = list(self.peaks)
        return max(phases, key=lambda phase: self.phase_peak_bytes(phase, tier), default=None)

    def kinds_at_peak(self, tier: Tier) -> Kinds:
        """Bytes by kind at the highest moment of `tier`."""
        phase = self.peak_phase(tier)
        return {} if phase is None else self.peaks[phase].get(tier, {})

    def tiers(self) -> list[Tier]:
        """The tiers that hold anything, in the order of `Tier`."""
        return [tier for tier in Tier if self.peak_bytes(tier) > 0]

    def with_margin(self, share: float = MARGIN_SHARE) -> MemoryTable:
        """A copy with `share` of every total added as `Kind.MARGIN` (safety beats speed)."""
        return MemoryTable(
            {
                phase: {tier: _add_margin(kinds, share) for tier, kinds in tiers.items()}
                for phase, tiers in self.peaks.items()
            }
        )

    def plus(
        self, tier: Tier, kind: Kind, count_bytes: int, only: Phase | None = None
    ) -> MemoryTable:
        """A copy with `count_bytes` more of `kind` on `tier`, throughout or in one phase `only`."""
        return MemoryTable(
            {
                phase: tiers
                if only not in (None, phase)
                else {
                    **tiers,
                    tier: {
                        **tiers.get(tier, {}),
                        kind: tiers.get(tier, {}).get(kind, 0) + count_bytes,
                    },
                }
                for phase, tiers in self.peaks.items()
            }
        )

    def diff(self, measured: MemoryTable) -> list[Difference]:
        """This bill beside what was measured: for every phase that either knows and each tier that
        holds anything, the total and each kind at the tier's peak."""
        return [
            row
            for phase in Phase
            for tier in Tier
            for row in _compare_tier(self, measured, phase, tier)
        ]

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """Nested plain dictionaries, for reports and plans."""
        return {
            str(phase): {
                str(tier): {str(kind): count for kind, count in kinds.items() if count}
                for tier, kinds in tiers.items()
                if sum(kinds.values())
            }
            for phase, tiers in self.peaks.items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, Mapping[str, int]]]) -> MemoryTable:
        """The inverse of `to_json`."""
        return cls(
            {
                Phase(phase): {
                    Tier(tier): {Kind(kind): int(count) for kind, count in kinds.items()}
                    for tier, kinds in tiers.items()
                }
                for phase, tiers in data.items()
            }
        )


def _add_margin(kinds: Kinds, share: float) -> Kinds:
    margin = int(sum(kinds.values()) * share)
    return {**kinds, Kind.MARGIN: kinds.get(Kind.MARGIN, 0) + margin}


@dataclass(frozen=True)
class Difference:
    """Predicted beside measured for one phase and tier, or one kind of it.

    Attributes:
        kind: None for the total of the phase and tier.
    """

    phase: Phase
    tier: Tier
    kind: Kind | None
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where nothing was measured."""
        if self.measured_bytes == 0:
            return None
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def _compare_tier(
    bill: MemoryTable, measured: MemoryTable, phase: Phase, tier: Tier
) -> Iterable[Difference]:
    predicted = bill.peaks.get(phase, {}).get(tier, {})
    seen = measured.peaks.get(phase, {}).get(tier, {})
    if not sum(predicted.values()) and not sum(seen.values()):
        return
    yield Difference(phase, tier, None, sum(predicted.values()), sum(seen.values()))
    for kind in Kind:
        if predicted.get(kind, 0) or seen.get(kind, 0):
            yield Difference(phase, tier, kind, predicted.get(kind, 0), seen.get(kind, 0))
