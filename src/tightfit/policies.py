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


class AttentionKernel(StrEnum):
    """Which implementation of attention runs."""

    SDPA = "sdpa"  # torch's: flash where no mask forbids it, else memory-efficient
    FLASH = "flash"  # the flash-attention package
    EAGER = "eager"  # all scores [batch, heads, seq, seq] at once


class OptimizerName(StrEnum):
    """The optimizers that bills know."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    LION = "lion"
    LION_8BIT = "lion_8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


@dataclass(frozen=True)
class BatchPolicy:
    """How a data-parallel rank's share of the global batch is split."""

    micro_batch_size: int = 1
    accumulation_steps: int = 1

    @property
    def sequences_per_rank(self) -> int:
        """Sequences per optimizer step and data-parallel rank."""
        return self.micro_batch_size * self.accumulation_steps


@dataclass(frozen=True)
class ShardingPolicy:
    """How ranks share the work and the model states.

    Attributes:
        ranks: processes in all, one per device.
        zero_stage: what data-parallel ranks share out (https://arxiv.org/abs/1910.02054):
            0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        tensor_parallel: ranks that share each layer's matrices.
        pipeline_parallel: stages, each with its own layers.
    """

    ranks: int = 1
    zero_stage: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel)


@dataclass(frozen=True)
class LossPolicy:
    """Cross-entropy; `chunk_tokens` positions at a time when chunked."""

    kind: LossKind = LossKind.FULL
    chunk_tokens: int = 256


@dataclass(frozen=True)
class CheckpointingPolicy:
    """Gradient checkpointing: keep each layer's input only and recompute the rest in backward."""

    enabled: bool = False
    every: int = 1  # 2: every second layer only, "selective"


@dataclass(frozen=True)
class AttentionPolicy:
    """The kernel of attention."""

    kernel: AttentionKernel = AttentionKernel.SDPA


@dataclass(frozen=True)
class PlacementPolicy:
    """Tiers of the model states and of saved activations (master weights live with the states)."""

    gradients: Tier = Tier.DEVICE
    optimizer_states: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    activations: Tier = Tier.DEVICE


@dataclass(frozen=True)
class QuantisationPolicy:
    """A frozen base of `bits` bits: 4 is NF4 (https://arxiv.org/abs/2305.14314).

    Attributes:
        block: weights that share one scale.
        double: whether the scales are quantised to 8 bits themselves, in blocks of 256.
    """

    bits: int = 4
    block: int = 64
    double: bool = True


@dataclass(frozen=True)
class AdapterPolicy:
    """LoRA adapters (https://arxiv.org/abs/2106.09685) on `targets`; an empty tuple: all linear."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()


PRECISIONS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes per parameter


@dataclass(frozen=True)
class PrecisionPolicy:
    """Type of the parameters on the device; optimizers of 16-bit ones keep an fp32 master."""

    parameters: str = "fp32"

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter on the device."""
        return PRECISIONS[self.parameters]


@dataclass(frozen=True)
class OptimizerPolicy:
    """The optimizer and the numbers that are its own."""

    name: OptimizerName = OptimizerName.ADAMW
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
    quantisation: QuantisationPolicy | None = None
    attention: AttentionPolicy = field(default_factory=AttentionPolicy)
    sharding: ShardingPolicy = field(default_factory=ShardingPolicy)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.batch.sequences_per_rank * self.sharding.data_parallel

    def __post_init__(self) -> None:
        check_compatible(self)


def check_compatible(policies: Policies) -> None:
    """Refuse combinations that cannot work.

    Raises:
        UnsupportedError: naming the nearest combination that works.
    """
    _check_placement(policies.placement)
    _check_sharding(policies.sharding)
    batch = policies.batch
    if batch.micro_batch_size < 1 or batch.accumulation_steps < 1:
        raise UnsupportedError(
            f"a batch of {batch.micro_batch_size} x {batch.accumulation_steps} "
            "sequences; both factors must be at least 1"
        )
    if policies.loss.chunk_tokens < 1:
        raise UnsupportedError(f"chunk_tokens must be at least 1, not {policies.loss.chunk_tokens}")
    if policies.checkpointing.every < 1:
        raise UnsupportedError("checkpointing every 0 layers; 1 is every layer")
    if policies.quantisation is not None and policies.adapter is None:
        raise UnsupportedError(
            "a quantised base cannot be trained itself: add adapters (finetuning_type: lora)"
        )


def _check_placement(placement: PlacementPolicy) -> None:
    if placement.gradients not in (Tier.DEVICE, Tier.HOST):
        raise UnsupportedError(
            f"gradients can be placed on device or host, not on {placement.gradients}"
        )
    if Tier.PINNED in (placement.optimizer_states, placement.parameters, placement.activations):
        raise UnsupportedError("pinned is how the host holds what travels; say host")
    if placement.activations is Tier.NVME:
        raise UnsupportedError("activations can be placed on device or host, not on nvme")
    on_device = placement.optimizer_states is Tier.DEVICE
    if (placement.gradients is Tier.DEVICE) != on_device:
        raise UnsupportedError(
            f"gradients on {placement.gradients} with optimizer states on "
            f"{placement.optimizer_states}: gradients go where the update runs, which is the "
            "host as soon as the states leave the device"
        )


def _check_sharding(sharding: ShardingPolicy) -> None:
    sizes = (sharding.ranks, sharding.tensor_parallel, sharding.pipeline_parallel)
    if min(sizes) < 1 or sharding.zero_stage not in (0, 1, 2, 3):
        raise UnsupportedError("ranks and parallel sizes start at 1; zero_stage is 0, 1, 2 or 3")
    width = sharding.tensor_parallel * sharding.pipeline_parallel
    if sharding.ranks % width:
        raise UnsupportedError(
            f"{sharding.ranks} ranks cannot be split into tensor parallel "
            f"{sharding.tensor_parallel} x pipeline parallel {sharding.pipeline_parallel}; "
            f"take a multiple of {width}"
        )
