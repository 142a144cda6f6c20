"""What a planner decides: the policies, their bill and time, and what was turned down.

Plain data; `search.py` makes it, `plan_file.py` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tightfit.bill.table import MemoryTable
from tightfit.policies import AttentionKernel, LossKind, OptimizerName, Policies, Tier
from tightfit.units import format_bytes


@dataclass(frozen=True)
class Limits:
    """Most bytes per tier; None is no limit.

    Attributes:
        shared_bytes: most bytes of device and host together, where both are the same RAM.
        ranks: processes that share the host.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    shared_bytes: int | None = None
    ranks: int = 1

    def missing_bytes(self, bill: MemoryTable) -> int:
        """How far `bill` is over the limits; zero or less if it fits."""
        tightest = self.tightest(bill)
        return 0 if tightest is None else tightest.need_bytes - tightest.limit_bytes

    def tightest(self, bill: MemoryTable) -> LimitUse | None:
        """The limit that `bill` is furthest over, or nearest to; None without limits."""
        device = bill.peak_bytes(Tier.DEVICE)
        host = self.ranks * (bill.peak_bytes(Tier.HOST) + bill.peak_bytes(Tier.PINNED))
        uses = [
            LimitUse(name, need, limit)
            for name, need, limit in (
                ("device", device, self.device_bytes),
                ("host", host, self.host_bytes),
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
            **bill_json(self.bill, self.limits),
            "plan": techniques(self.policies),
            "step_seconds": self.step_time.total,
            "step_seconds_by_part": self.step_time.to_json(),
            "parameters": {
                "trainable": self.trainable_parameters,
                "frozen": self.frozen_parameters,
            },
            "plain_peak_bytes": {str(tier): self.plain.peak_bytes(tier) for tier in Tier},
            "reasons": list(self.reasons),
            "alternatives": [_alternative_json(candidate) for candidate in self.alternatives],
        }


def bill_json(bill: MemoryTable, limits: Limits) -> dict[str, object]:
    """What plans and estimates say of their bills."""
    return {
        "fits": limits.missing_bytes(bill) <= 0,
        "limits": dict(limits.__dict__),
        "peak_bytes": {str(tier): bill.peak_bytes(tier) for tier in Tier},
        "phases": {
            str(phase): {str(tier): bill.phase_peak_bytes(phase, tier) for tier in Tier}
            for phase in bill.peaks
        },
        "kinds": {
            str(tier): {str(k): n for k, n in bill.kinds_at_peak(tier).items() if n}
            for tier in bill.tiers()
        },
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
    batch, placement, sharding = policies.batch, policies.placement, policies.sharding
    chosen = {
        "batch": f"{batch.micro_batch_size} x {batch.accumulation_steps}",
        "gradient_checkpointing": _checkpointing_word(policies),
        "loss": str(policies.loss.kind),
        "attention": str(policies.attention.kernel),
        "offload_optimizer": _PLACE_WORDS[placement.optimizer_states],
        "offload_param": _PLACE_WORDS[placement.parameters],
        "offload_activations": str(placement.activations is not Tier.DEVICE).lower(),
        "precision": policies.precision.parameters,
        "optim": str(policies.optimizer.name),
        "finetuning_type": "full" if policies.adapter is None else "lora",
    }
    if policies.adapter is not None:
        chosen["lora_rank"] = str(policies.adapter.rank)
    if policies.quantisation is not None:
        chosen["quantization_bit"] = str(policies.quantisation.bits)
    if sharding.ranks > 1:
        chosen |= {
            "num_gpus": str(sharding.ranks),
            "zero_stage": str(sharding.zero_stage),
            "tensor_parallel_size": str(sharding.tensor_parallel),
            "pipeline_parallel_size": str(sharding.pipeline_parallel),
        }
    return chosen


_PLACE_WORDS = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.NVME: "nvme"}
_PLACE_NAMES = {Tier.HOST: "host", Tier.NVME: "NVMe"}


def _checkpointing_word(policies: Policies) -> str:
    if policies.checkpointing.enabled and policies.checkpointing.every > 1:
        return "selective"
    return str(policies.checkpointing.enabled).lower()


def describe_policies(policies: Policies) -> str:
    """One line: the batch and the techniques that are on."""
    batch = policies.batch
    parts = [f"micro-batch {batch.micro_batch_size} x {batch.accumulation_steps}"]
    parts += _describe_sharding(policies)
    parts += _describe_numerics(policies)
    if policies.loss.kind is LossKind.CHUNKED:
        parts.append("chunked loss")
    if policies.checkpointing.enabled:
        parts.append(
            "selective checkpointing" if policies.checkpointing.every > 1 else "checkpointing"
        )
    parts += _describe_placement(policies)
    return ", ".join(parts)


def _describe_sharding(policies: Policies) -> Iterator[str]:
    sharding = policies.sharding
    if sharding.ranks == 1:
        return
    yield f"{sharding.ranks} ranks"
    if sharding.data_parallel > 1:
        yield f"ZeRO-{sharding.zero_stage}" if sharding.zero_stage else "data parallel"
    if sharding.tensor_parallel > 1:
        yield f"tensor parallel {sharding.tensor_parallel}"
    if sharding.pipeline_parallel > 1:
        yield f"pipeline of {sharding.pipeline_parallel} stages"


def _describe_numerics(policies: Policies) -> Iterator[str]:
    if policies.adapter is not None:
        yield f"LoRA rank {policies.adapter.rank}"
    if policies.quantisation is not None:
        yield f"{policies.quantisation.bits}-bit base"
    if policies.optimizer.name is not OptimizerName.ADAMW:
        yield str(policies.optimizer.name)
    if policies.attention.kernel is not AttentionKernel.SDPA:
        yield f"{policies.attention.kernel} attention"


def _describe_placement(policies: Policies) -> Iterator[str]:
    placement = policies.placement
    if placement.optimizer_states is not Tier.DEVICE:
        yield f"gradients + optimizer on {_PLACE_NAMES[placement.optimizer_states]}"
    if placement.parameters is not Tier.DEVICE:
        yield f"parameters on {_PLACE_NAMES[placement.parameters]}"
    if placement.activations is not Tier.DEVICE:
        yield f"activations on {_PLACE_NAMES[placement.activations]}"


def count_techniques(policies: Policies) -> int:
    """How many techniques are on; of equally fast plans the one with fewest wins."""
    placement = policies.placement
    return (
        (policies.adapter is not None)
        + (policies.quantisation is not None)
        + (policies.loss.kind is LossKind.CHUNKED)
        + policies.checkpointing.enabled
        + (placement.optimizer_states is not Tier.DEVICE)
        + (placement.parameters is not Tier.DEVICE)
        + (placement.activations is not Tier.DEVICE)
        + (policies.batch.accumulation_steps > 1)
    )
