"""What a planner decides: the policies, their bill and time, and what was turned down.

Plain data; `search.py` makes it, `plan_file.py` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.bill.table import MemoryTable
from tightfit.policies import LossKind, Policies, Tier
from tightfit.units import format_bytes


@dataclass(frozen=True)
class Limits:
    """Most bytes per tier; None is no limit.

    Attributes:
        shared_bytes: most bytes of device and host together, where both are the same RAM.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    shared_bytes: int | None = None

    def missing_bytes(self, bill: MemoryTable) -> int:
        """How far `bill` is over the limits; zero or less if it fits."""
        tightest = self.tightest(bill)
        return 0 if tightest is None else tightest.need_bytes - tightest.limit_bytes

    def tightest(self, bill: MemoryTable) -> LimitUse | None:
        """The limit that `bill` is furthest over, or nearest to; None without limits."""
        device, host = bill.peak_bytes(Tier.DEVICE), bill.peak_bytes(Tier.HOST)
        uses = [
            LimitUse(name, need, limit)
            for name, need, limit in (
                ("device", device, self.device_bytes),
                ("host", host + bill.peak_bytes(Tier.PINNED), self.host_bytes),
                ("RAM", device + host, self.shared_bytes),
            )
            if limit is not None
        ]
        return max(uses, key=lambda use: use.need_bytes - use.limit_bytes, default=None)


@dataclass(frozen=True)
class LimitUse:
    """What a bill takes of one limit: `device`, `host`, or `RAM` where they share it."""

    name: str
    need_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        need, limit = format_bytes(self.need_bytes), format_bytes(self.limit_bytes)
        return f"needs {need}, {self.name} limit {limit}"


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one optimizer step, by what they are spent on."""

    compute: float
    recompute: float
    optimizer: float
    copies: float
    overhead: float

    @property
    def total(self) -> float:
        """All parts; nothing overlaps in the engine as it is."""
        return self.compute + self.recompute + self.optimizer + self.copies + self.overhead

    def to_json(self) -> dict[str, float]:
        """The parts and their total."""
        return {**self.__dict__, "total": self.total}


@dataclass(frozen=True)
class Candidate:
    """Policies that were priced.

    Attributes:
        bill: None where the closed form alone was already over the limit, or where the model
            does not support the policies.
        verdict: why it was chosen or turned down, with the number that decided.
    """

    policies: Policies
    bill: MemoryTable | None
    step_time: StepTime
    verdict: str


@dataclass(frozen=True)
class Plan:
    """The chosen policies and everything said about them.

    Attributes:
        bill: of `policies` at full depth, margin included.
        plain: bill of the same job without any technique, margin included.
        reasons: one sentence for each technique: what it saves here and what it costs.
        alternatives: what was turned down, in the order of predicted time.
    """

    policies: Policies
    bill: MemoryTable
    plain: MemoryTable
    step_time: StepTime
    limits: Limits
    trainable_parameters: int
    frozen_parameters: int
    reasons: tuple[str, ...]
    alternatives: tuple[Candidate, ...]

    @property
    def fits(self) -> bool:
        """Whether the bill is within the limits."""
        return self.limits.missing_bytes(self.bill) <= 0

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        return {
            "fits": self.fits,
            "peak_bytes": {str(tier): self.bill.peak_bytes(tier) for tier in Tier},
            "phases": {
                str(phase): {str(tier): self.bill.phase_peak_bytes(phase, tier) for tier in Tier}
                for phase in self.bill.peaks
            },
            "kinds": {
                str(tier): {str(k): n for k, n in self.bill.kinds_at_peak(tier).items() if n}
                for tier in self.bill.tiers()
            },
            "plan": techniques(self.policies),
            "step_seconds": self.step_time.total,
            "step_seconds_by_part": self.step_time.to_json(),
            "parameters": {
                "trainable": self.trainable_parameters,
                "frozen": self.frozen_parameters,
            },
            "limits": dict(self.limits.__dict__),
            "plain_peak_bytes": {str(tier): self.plain.peak_bytes(tier) for tier in Tier},
            "reasons": list(self.reasons),
            "alternatives": [_alternative_json(candidate) for candidate in self.alternatives],
        }


def _alternative_json(candidate: Candidate) -> Mapping[str, object]:
    bill = candidate.bill
    return {
        "plan": techniques(candidate.policies),
        "device_peak_bytes": bill.peak_bytes(Tier.DEVICE) if bill else None,
        "step_seconds": candidate.step_time.total,
        "verdict": candidate.verdict,
    }


def techniques(policies: Policies) -> dict[str, str]:
    """The choices in the words of the job's keys."""
    batch = policies.batch
    chosen = {
        "batch": f"{batch.micro_batch_size} x {batch.accumulation_steps}",
        "gradient_checkpointing": str(policies.checkpointing.enabled).lower(),
        "loss": str(policies.loss.kind),
        "offload_optimizer": (
            "cpu" if policies.placement.optimizer_states is Tier.HOST else "none"
        ),
        "precision": policies.precision.parameters,
        "finetuning_type": "full" if policies.adapter is None else "lora",
    }
    if policies.adapter is not None:
        chosen["lora_rank"] = str(policies.adapter.rank)
    return chosen


def describe_policies(policies: Policies) -> str:
    """One line: the batch and the techniques that are on."""
    batch = policies.batch
    parts = [f"micro-batch {batch.micro_batch_size} x {batch.accumulation_steps}"]
    if policies.adapter is not None:
        parts.append(f"LoRA rank {policies.adapter.rank}")
    if policies.loss.kind is LossKind.CHUNKED:
        parts.append("chunked loss")
    if policies.checkpointing.enabled:
        parts.append("checkpointing")
    if policies.placement.optimizer_states is Tier.HOST:
        parts.append("gradients + optimizer on host")
    return ", ".join(parts)


def count_techniques(policies: Policies) -> int:
    """How many techniques are on; of equally fast plans the one with fewest wins."""
    return (
        (policies.adapter is not None)
        + (policies.loss.kind is LossKind.CHUNKED)
        + policies.checkpointing.enabled
        + (policies.placement.optimizer_states is Tier.HOST)
        + (policies.batch.accumulation_steps > 1)
    )
