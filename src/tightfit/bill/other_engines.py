"""Runs with other engines in words: DeepSpeed, FSDP1, FSDP2, DDP, Megatron-LM, one process.

`OtherRun` describes such a run. What its engine holds of a model's states is in `other_states.py`
and `other_megatron.py`, activations come from `dry_run.other_engines`. Together the third of the
three bills: what the tool named would take for its own config, by the tool's own accounting, never
what tightfit's engine takes. Knows no torch and no numbers of any model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tightfit.policies import AdapterPolicy

FP32_BYTES = 4
BF16_BYTES = 2


class OtherEngine(StrEnum):
    """Which program trains."""

    SINGLE = "one process"  # a plain loop or the Hugging Face Trainer on one card
    DDP = "DDP"  # torch.nn.parallel.DistributedDataParallel
    FSDP1 = "FSDP1"  # torch.distributed.fsdp.FullyShardedDataParallel
    FSDP2 = "FSDP2"  # torch.distributed.fsdp.fully_shard
    ZERO1 = "ZeRO-1"  # DeepSpeed
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    MEGATRON = "Megatron"  # Megatron-core, its own parameter and gradient buffers


class Recompute(StrEnum):
    """What is computed again in backward."""

    NONE = "none"
    FULL = "full"  # every layer keeps its input only
    ALTERNATE = "alternate"  # every second layer keeps its input only
    SELECTIVE = "selective"  # torchtitan's: attention and every second matrix product are kept


class Metric(StrEnum):
    """What a published figure counts."""

    ALLOCATED = "allocated"  # torch.cuda.max_memory_allocated
    RESERVED = "reserved"  # torch.cuda.max_memory_reserved: with what the allocator cannot hand out
    DEVICE = "device"  # nvidia-smi: with the context and the communication library too


@dataclass(frozen=True)
class OtherLoss:
    """How logits become a loss.

    Attributes:
        upcast: logits are copied to fp32.
        shift_copy: the shifted logits are a copy of their own (transformers before 4.46).
        keep_logits: the caller's reference keeps the logits alive in backward.
        head_chunks: pieces along the sequence in which logits are made, all of them kept.
        fused: the loss keeps the logits as they are and writes their gradient at once (a compiled
            or hand-written kernel).
        offloaded: the logits that backward needs wait on the host.
        recompute_tokens: positions whose logits live at one time, made again in backward; None
            where all logits live at once.
    """

    upcast: bool = True
    shift_copy: bool = False
    keep_logits: bool = True
    head_chunks: int = 1
    fused: bool = False
    offloaded: bool = False
    recompute_tokens: int | None = None


@dataclass(frozen=True)
class Widths:
    """Bytes per parameter.

    Attributes:
        weight: a stored parameter that is not quantised.
        compute: a parameter as layers read it, and an activation.
        gradient: a stored gradient.
        reduce: a gradient as ranks exchange it.
        master: an fp32 copy that the optimizer keeps.
        states: the optimizer's moments, both together.
        step: temporaries of the optimizer's step.
        adapter: a stored parameter of an adapter; None where it is as wide as `weight`.
        quantised: a quantised weight of a linear layer with its scales; None where none is.
        quantised_head: whether the output layer is quantised like the others.
        keeps_unpacked: the unpacked matrices of a layer wait for its backward (auto_gptq's kernels
            in torch, whose plain products keep them); else only the one in use is unpacked.
    """

    weight: float = BF16_BYTES
    compute: float = BF16_BYTES
    gradient: float = BF16_BYTES
    reduce: float = BF16_BYTES
    master: float = 0
    states: float = 2 * FP32_BYTES
    step: float = 0
    adapter: float | None = None
    quantised: float | None = None
    quantised_head: bool = False
    keeps_unpacked: bool = False


@dataclass(frozen=True)
class DeepSpeedBuckets:
    """Elements of DeepSpeed's buffers; defaults of its config (docs: "ZeRO optimizations").

    Attributes:
        reduce: `reduce_bucket_size`.
        prefetch: `stage3_prefetch_bucket_size`.
        live: `stage3_max_live_parameters` and `stage3_max_reuse_distance`, whichever is less.
        sub_group: `sub_group_size`, parameters that one stage-3 step updates at a time.
        overlap: `overlap_comm`, which fills a second bucket while one travels.
    """

    reduce: float = 5e8
    prefetch: float = 5e7
    live: float = 1e9
    sub_group: float = 1e9
    overlap: bool = True


@dataclass(frozen=True)
class OtherRun:
    """One training run with another engine, as its rank sees it.

    Attributes:
        shards: ranks that share the states between them.
        tensor_parallel: ranks that share each matrix.
        sequence_parallel: whether they share the activations between matrices too.
        pipeline_parallel: stages; `in_flight` micro-batches are alive on the stage billed.
        context_parallel: ranks that share each sequence.
        accumulates: gradients of earlier micro-batches are alive in forward.
        autocast: parameters are fp32 and operations cast them as they go.
        compiled: layers are compiled, so that a layer's pointwise results are not all alive.
        fused_qkv: query, key and value are one matrix product (litgpt, Qwen's first models): the
            values that attention keeps are a part of it and keep all of it, and adapters of the
            three read one dropout.
        keeps_inputs: bytes per value of what linear layers keep of their input although their
            weights are frozen. 2: the input itself (bitsandbytes' 4-bit products before 0.44). 4: a
            copy of their own in fp32 (litgpt's layers around bitsandbytes; inferred from its
            published figures with and without quantisation).
        keeps_mlp_product: the MLP's last product keeps its input though its weights are frozen
            (litgpt; inferred from the slopes per sample that it publishes for four architectures).
        keeps_outputs: linear layers and norms keep their output, which a trained scale multiplies
            (LLaMA-Adapter v2).
        keep_root: FSDP's outermost group (embedding, head) stays gathered to the end of backward.
        no_sync: gradients are reduced after the last micro-batch only, and whole until then.
        frozen_gradients: FSDP1 with `use_orig_params` around frozen and trained parameters: a flat
            parameter has a gradient as large as itself.
        lengths: of the samples of one step after the other, as shares of the longest; what was of
            other sizes before is what the allocator cannot hand out.
        expandable_segments: as `PYTORCH_CUDA_ALLOC_CONF` says.
        card_bytes: memory of the card, which nothing reserved can exceed; None for any.
        capability: of the card, which decides the kernels of attention.
        keep_layers: FSDP gathers each layer once per step (`reshard_after_forward` false).
        optimizer_in_backward: each parameter is updated and its gradient freed at once.
        optimizer_on_disk, parameters_on_disk: what is offloaded is not on the host.
    """

    engine: OtherEngine = OtherEngine.SINGLE
    micro_batch_size: int = 1
    sequence_length: int = 2048
    shards: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    in_flight: int = 1
    context_parallel: int = 1
    accumulates: bool = False
    widths: Widths = field(default_factory=Widths)
    adapter: AdapterPolicy | None = None
    train_embeddings: bool = False
    autocast: bool = False
    compiled: bool = False
    recompute: Recompute = Recompute.NONE
    flash_attention: bool = True
    loss: OtherLoss = field(default_factory=OtherLoss)
    fused_qkv: bool = False
    keeps_inputs: int = 0
    keeps_mlp_product: bool = False
    keeps_outputs: bool = False
    keep_root: bool = True
    keep_layers: bool = False
    no_sync: bool = False
    frozen_gradients: bool = False
    optimizer_in_backward: bool = False
    offload_activations: bool = False
    offload_parameters: bool = False
    offload_optimizer: bool = False
    offload_gradients: bool = False
    optimizer_on_disk: bool = False
    parameters_on_disk: bool = False
    deepspeed: DeepSpeedBuckets = field(default_factory=DeepSpeedBuckets)
    metric: Metric = Metric.ALLOCATED
    lengths: tuple[float, ...] = (1.0, 1.0)
    expandable_segments: bool = False
    card_bytes: int | None = None
    capability: tuple[int, int] = (8, 0)

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch that this rank computes."""
        return self.micro_batch_size * self.sequence_length // self.context_parallel

    @property
    def adapter_width(self) -> float:
        """Bytes of a stored adapter parameter."""
        return self.widths.weight if self.widths.adapter is None else self.widths.adapter
