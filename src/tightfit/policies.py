"""One small frozen dataclass per technique, and which of them go together.

A policy says what is to be done, never how: the engine makes it true, the bill prices it, the
planner chooses it. Knows no model, no machine and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tightfit.errors import UnsupportedError


class Tier(StrEnum):
    """Where bytes live. `PINNED` is the page-locked part of the host, counted apart from it."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"
    NVME = "nvme"


class LossKind(StrEnum):
    """How the cross-entropy is computed."""

    FULL = "full"  # all logits [tokens, vocabulary] at once
    CHUNKED = "chunked"  # a few tokens' logits at a time, gradients made in the same pass


@dataclass(frozen=True)
class BatchPolicy:
    """How the global batch is split. One rank: global = micro_batch_size x accumulation_steps."""

    micro_batch_size: int = 1
    accumulation_steps: int = 1

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.accumulation_steps


@dataclass(frozen=True)
class LossPolicy:
    """Cross-entropy; `chunk_tokens` positions at a time when chunked."""

    kind: LossKind = LossKind.FULL
    chunk_tokens: int = 256


@dataclass(frozen=True)
class CheckpointingPolicy:
    """Gradient checkpointing: keep each layer's input only and recompute the rest in backward."""

    enabled: bool = False


@dataclass(frozen=True)
class PlacementPolicy:
    """Tiers of gradients and of optimizer states (master weights live with the states)."""

    gradients: Tier = Tier.DEVICE
    optimizer_states: Tier = Tier.DEVICE


@dataclass(frozen=True)
class AdapterPolicy:
    """LoRA adapters (https://arxiv.org/abs/2106.09685) on `targets`; an empty tuple: all linear."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionPolicy:
    """Type of the parameters on the device; optimizers of 16-bit ones keep an fp32 master."""

    parameters: str = "fp32"

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter on the device."""
        return {"fp32": 4, "bf16": 2}[self.parameters]


@dataclass(frozen=True)
class OptimizerPolicy:
    """The optimizer and the numbers that are its own."""

    name: str = "adamw"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Policies:
    """All choices for one job."""

    batch: BatchPolicy = field(default_factory=BatchPolicy)
    loss: LossPolicy = field(default_factory=LossPolicy)
    checkpointing: CheckpointingPolicy = field(default_factory=CheckpointingPolicy)
    placement: PlacementPolicy = field(default_factory=PlacementPolicy)
    precision: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    optimizer: OptimizerPolicy = field(default_factory=OptimizerPolicy)
    adapter: AdapterPolicy | None = None

    def __post_init__(self) -> None:
        check_compatible(self)


def check_compatible(policies: Policies) -> None:
    """Refuse combinations that cannot work.

    Raises:
        UnsupportedError: naming the nearest combination that works.
    """
    placement = policies.placement
    for name in ("gradients", "optimizer_states"):
        if getattr(placement, name) not in (Tier.DEVICE, Tier.HOST):
            raise UnsupportedError(
                f"{name} can be placed on device or host, not on {getattr(placement, name)}"
            )
    if placement.gradients != placement.optimizer_states:
        raise UnsupportedError(
            f"gradients on {placement.gradients} with optimizer states on "
            f"{placement.optimizer_states}: both must be on the same tier, "
            "which is where the update runs"
        )
    batch = policies.batch
    if batch.micro_batch_size < 1 or batch.accumulation_steps < 1:
        raise UnsupportedError(
            f"a batch of {batch.micro_batch_size} x {batch.accumulation_steps} "
            "sequences; both factors must be at least 1"
        )
    if policies.loss.chunk_tokens < 1:
        raise UnsupportedError(f"chunk_tokens must be at least 1, not {policies.loss.chunk_tokens}")
