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
    SLICED = "sliced"  # a slice of the vocabulary at a time, made again in backward


class AttentionKernel(StrEnum):
    """Which implementation of attention runs."""

    SDPA = "sdpa"  # torch's: flash where no mask forbids it, else memory-efficient
    FLASH = "flash"  # the flash-attention package
    EAGER = "eager"  # all scores [batch, heads, seq, seq] at once


class OptimizerName(StrEnum):
    """The optimizers that bills know."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_COMPACT = "adamw_compact"
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


class PipelineSchedule(StrEnum):
    """In which order the stages of a pipeline take the micro-batches of a step."""

    ONE_FORWARD_ONE_BACKWARD = "1f1b"  # a stage has as many in flight as stages come after it, +1
    GPIPE = "gpipe"  # all forwards, then all backwards: every micro-batch is in flight
    INTERLEAVED = "interleaved"  # 1f1b over several runs of layers on each stage: it waits less


@dataclass(frozen=True)
class ShardingPolicy:
    """How ranks share the work and the model states.

    Attributes:
        ranks: processes in all, one per device.
        zero_stage: what data-parallel ranks share out (https://arxiv.org/abs/1910.02054):
            0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        tensor_parallel: ranks that share each layer's matrices.
        pipeline_parallel: stages, each with its own layers.
        replicas: whole copies of what data-parallel ranks share out (HSDP): each is shared by
            `data_parallel / replicas` of them. Stage 0 shares nothing, so every rank has a copy.
        pipeline_schedule: where there are stages.
        virtual_stages: runs of layers that each stage has, more than one if interleaved.
        stage_layers: how many layers each run has, in the order of the model: run number r is
            stage `r % pipeline_parallel`'s. Empty: stages weigh alike in parameters.
    """

    ranks: int = 1
    zero_stage: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model states out."""
        return self.data_parallel // self.replicas if self.zero_stage else 1

    @property
    def updaters(self) -> int:
        """Ranks that update one copy of the model together, each a part of its own."""
        return self.shards * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class LossPolicy:
    """Cross-entropy; `chunk_tokens` positions at a time when chunked, `slice_rows` of the output
    layer when sliced. What it has beside is in training only (`engine/loss_terms.py`)."""

    kind: LossKind = LossKind.FULL
    chunk_tokens: int = 256
    slice_rows: int = 4096
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def has_terms(self) -> bool:
        """Whether there is anything but cross-entropy."""
        return bool(self.label_smoothing or self.z_loss)


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
    """Tiers of the model states and of saved activations (master weights live with the states).

    Attributes:
        gradients: where those of several micro-batches add up. They end where the update runs.
        optimizer_states: of as many of the last layers as the fraction says; others' are on the
            device, with their gradients.
        parameters: of as many of the first layers as the fraction says; each is on the device
            while it computes. Frozen ones too, which are never written back.
        optimizer_fraction, parameter_fraction: of the decoder's layers, rounded up. What belongs
            to no layer goes where all layers go, and stays on the device when one stays.
        prefetch: layers whose parameters, or activations, are fetched ahead.
        lazy_step: whether updates off the device go on while the next forward runs; each layer
            waits for its own.
    """

    gradients: Tier = Tier.DEVICE
    optimizer_states: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    activations: Tier = Tier.DEVICE
    optimizer_fraction: float = 1.0
    parameter_fraction: float = 1.0
    prefetch: int = 1
    lazy_step: bool = False


# Activations in smaller storages stay: a copy of them takes less time than beginning one (10 us).
SMALLEST_LEAVING_BYTES = 2**16


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
    """LoRA adapters (https://arxiv.org/abs/2106.09685).

    Attributes:
        targets: modules that get one, by name; empty: all linear layers but the output layer.
        rslora: whether they are scaled by alpha / sqrt(rank) in place of alpha / rank, so that
            gradients keep their size at high ranks (https://arxiv.org/abs/2312.03732).
        dora: whether direction and magnitude of weights are trained apart, the magnitude as one
            number for each output (https://arxiv.org/abs/2402.09353).
        modules_to_save: modules that are trained whole beside them, by the ends of their names.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()


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
class LossScalePolicy:
    """How losses are scaled where gradients are fp16, as of DeepSpeed's `fp16`.

    Attributes:
        static: the scale, if it is always the same; 0: it follows overflows.
        initial_power: of two, that it begins with.
        window: steps without an overflow after which it is doubled.
        hysteresis: the overflow that halves it first.
        minimum: that it is never below.
    """

    static: float = 0.0
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0


class Master(StrEnum):
    """How an optimizer keeps 32 bits of a 16-bit parameter, which it cannot update itself."""

    FP32 = "fp32"  # a copy, 4 bytes
    SPLIT = "split"  # the 16 bits that the parameter lacks, 2 bytes: the numbers of a copy
    SPLIT_8 = "split_8"  # of matrices the upper 8 of these, 1 byte: a master of 24 bits


@dataclass(frozen=True)
class OptimizerPolicy:
    """The optimizer and the numbers that are its own.

    Attributes:
        loss_scale: of fp16; gradients of other types are not scaled.
        master: of 16-bit parameters. One that is split is kept as the bf16 parameter and bits that
            it lacks; the parameter is the master rounded half away from zero.
    """

    name: OptimizerName = OptimizerName.ADAMW
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    loss_scale: LossScalePolicy = LossScalePolicy()
    master: Master = Master.FP32

    @property
    def split_master(self) -> bool:
        """Whether the parameter itself is the upper half of its master."""
        return self.master is not Master.FP32


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
    _check_update_place(policies)
    _check_sharding(policies.sharding)
    batch = policies.batch
    if batch.micro_batch_size < 1 or batch.accumulation_steps < 1:
        raise UnsupportedError(
            f"a batch of {batch.micro_batch_size} x {batch.accumulation_steps} "
            "sequences; both factors must be at least 1"
        )
    if min(policies.loss.chunk_tokens, policies.loss.slice_rows) < 1:
        raise UnsupportedError(
            f"chunk_tokens and slice_rows must be at least 1, not {policies.loss.chunk_tokens} and "
            f"{policies.loss.slice_rows}"
        )
    if policies.checkpointing.every < 1:
        raise UnsupportedError("checkpointing every 0 layers; 1 is every layer")
    if policies.quantisation is not None and policies.adapter is None:
        raise UnsupportedError(
            "a quantised base cannot be trained itself: add adapters (finetuning_type: lora)"
        )


_DISTANCE = (Tier.DEVICE, Tier.HOST, Tier.NVME)


def _check_placement(placement: PlacementPolicy) -> None:
    tiers = (placement.gradients, placement.optimizer_states, placement.parameters)
    if Tier.PINNED in (*tiers, placement.activations):
        raise UnsupportedError("pinned is how the host holds what travels; say host")
    if placement.activations is Tier.NVME:
        raise UnsupportedError("activations can be placed on device or host, not on nvme")
    if _DISTANCE.index(placement.gradients) > _DISTANCE.index(placement.optimizer_states):
        raise UnsupportedError(
            f"gradients on {placement.gradients} with optimizer states on "
            f"{placement.optimizer_states}: gradients can add up where the states are or nearer to "
            "the device"
        )
    for name in ("optimizer_fraction", "parameter_fraction"):
        fraction = getattr(placement, name)
        if not 0 < fraction <= 1:
            raise UnsupportedError(
                f"{name} is {fraction}; it is above 0 and at most 1 (for nothing, say device)"
            )
    if placement.prefetch < 0:
        raise UnsupportedError(f"prefetch is {placement.prefetch}; it is 0 or more")
    if placement.lazy_step and placement.optimizer_states is Tier.DEVICE:
        raise UnsupportedError("lazy_step is for states off the device: those on it take no time")


def _check_update_place(policies: Policies) -> None:
    """What is trained is updated where its states are, and must be there or pass by."""
    placement, everything = policies.placement, policies.adapter is None
    states_leave = placement.optimizer_states is not Tier.DEVICE
    parameters_leave = placement.parameters is not Tier.DEVICE
    all_leave = states_leave and placement.optimizer_fraction == 1
    if parameters_leave and everything and not all_leave:
        raise UnsupportedError(
            f"parameters on {placement.parameters} while optimizer states stay on the device: the "
            "states take more, so place all of them off the device first"
        )
    if policies.optimizer.split_master:
        if not everything or policies.precision.parameters != "bf16":
            raise UnsupportedError(
                "a split master needs parameters that are trained in bf16 themselves; leave it out"
            )
        if states_leave and not (parameters_leave and placement.parameter_fraction == 1):
            raise UnsupportedError(
                "a split master is half in the parameter itself, so the two must be together: "
                "place all parameters off the device too, or leave it out"
            )


def _check_sharding(sharding: ShardingPolicy) -> None:
    sizes = (
        sharding.ranks,
        sharding.tensor_parallel,
        sharding.pipeline_parallel,
        sharding.replicas,
        sharding.virtual_stages,
    )
    if min(sizes) < 1 or sharding.zero_stage not in (0, 1, 2, 3):
        raise UnsupportedError("ranks and parallel sizes start at 1; zero_stage is 0, 1, 2 or 3")
    width = sharding.tensor_parallel * sharding.pipeline_parallel
    if sharding.ranks % width:
        raise UnsupportedError(
            f"{sharding.ranks} ranks cannot be split into tensor parallel "
            f"{sharding.tensor_parallel} x pipeline parallel {sharding.pipeline_parallel}; "
            f"take a multiple of {width}"
        )
    _check_virtual_stages(sharding)
    _check_stage_layers(sharding)
    _check_replicas(sharding)


def _check_virtual_stages(sharding: ShardingPolicy) -> None:
    interleaved = sharding.pipeline_schedule is PipelineSchedule.INTERLEAVED
    if interleaved and sharding.pipeline_parallel == 1:
        raise UnsupportedError(
            "pipeline_schedule interleaved without a pipeline: set pipeline_parallel_size 2 or "
            "more, or leave it out"
        )
    if interleaved != (sharding.virtual_stages > 1):
        raise UnsupportedError(
            f"virtual_pipeline_stages {sharding.virtual_stages} with pipeline_schedule "
            f"{sharding.pipeline_schedule}: interleaved needs 2 or more, the others have 1"
        )


def _check_stage_layers(sharding: ShardingPolicy) -> None:
    given, stages, chunks = (
        sharding.stage_layers,
        sharding.pipeline_parallel,
        sharding.virtual_stages,
    )
    if not given:
        return
    said = f"pipeline_layers {','.join(map(str, given))}"
    if stages == 1:
        raise UnsupportedError(
            f"{said} without a pipeline: set pipeline_parallel_size, or leave it out"
        )
    if len(given) != stages * chunks:
        times = f" x virtual_pipeline_stages {chunks} = {stages * chunks}" if chunks > 1 else ""
        raise UnsupportedError(
            f"{said}: {len(given)} numbers of layers for pipeline_parallel_size {stages}{times}; "
            "give one for each, in the order of the model"
        )
    if min(given) < 1:
        raise UnsupportedError(f"{said}: each has one layer or more")


def _check_replicas(sharding: ShardingPolicy) -> None:
    if sharding.replicas == 1:
        return
    if sharding.zero_stage == 0:
        raise UnsupportedError(
            f"{sharding.replicas} replicas with zero_stage 0, where every rank is a replica: leave "
            "replicas out, or set zero_stage 1, 2 or 3"
        )
    ranks = sharding.data_parallel
    if ranks % sharding.replicas or ranks == sharding.replicas:
        fitting = [number for number in range(2, ranks) if ranks % number == 0]
        what_works = f"take one of {fitting}" if fitting else "leave replicas out"
        raise UnsupportedError(
            f"{ranks} data-parallel ranks cannot be {sharding.replicas} replicas of two shards or "
            f"more; {what_works}"
        )
