"""The keys of DeepSpeed's `zero_optimization`, and what becomes of them here."""

from __future__ import annotations

from tightfit.interop.entries import Accepts, Entry

_SWITCH, _COUNT, _NUMBER = Accepts.SWITCH, Accepts.COUNT, Accepts.NUMBER
_TEXT, _BLOCK = Accepts.TEXT, Accepts.ANYTHING
_PLACES = ("none", "cpu", "nvme")

_WHOLE_LAYER = "a whole layer is gathered at once"
_AS_MADE = "a layer's gradients are reduced when its backward is done, and overlap the next layer's"
_PINNED = "what travels goes through one pinned slab of the exact size"
_SUBGROUPS = "updates go layer by layer, a chunk that fits the cache at a time"
_DISK = "the disk's pipeline has as many buffers as keep it busy"
_ZERO_PP = "ranks exchange parameters and gradients unquantised"
_CHECKPOINTS = "checkpoints hold whole tensors; any number of ranks reads and writes them"


def _zero(name: str, accepts: Accepts, here: str, *usual: object, refused: bool = False) -> Entry:
    return Entry(f"zero_optimization.{name}", accepts, "", here, usual, refused=refused)


_STAGES = (
    Entry(
        "zero_optimization",
        _SWITCH,
        "zero_stage",
        "the form of old versions: true is stage 1",
    ),
    Entry("zero_optimization.stage", _COUNT, "zero_stage", words=("0", "1", "2", "3")),
    Entry(
        "zero_optimization.zero_hpz_partition_size",
        _COUNT,
        "",
        "no second copy of the parameters inside a machine; data_parallel_replicas keeps whole "
        "copies, which also spares the slow link",
        (0, 1),
    ),
    Entry(
        "zero_optimization.mics_shard_size",
        _COUNT,
        "data_parallel_replicas",
        "ranks / mics_shard_size whole copies (HSDP)",
        (-1,),
    ),
    _zero(
        "mics_hierarchical_params_gather",
        _SWITCH,
        "replicas gather inside their own shards only",
    ),
)

_GRADIENTS = (
    _zero("overlap_comm", _SWITCH, "always, and in stage 3 layers are gathered ahead", True),
    _zero("contiguous_gradients", _SWITCH, "gradients of a layer lie in one buffer", True),
    _zero("reduce_scatter", _SWITCH, "always from stage 2 on", True),
    _zero("reduce_bucket_size", _COUNT, _AS_MADE),
    _zero("allgather_partitions", _SWITCH, "always", True),
    _zero("allgather_bucket_size", _COUNT, _WHOLE_LAYER),
    _zero("use_multi_rank_bucket_allreduce", _SWITCH, _AS_MADE),
    _zero("compute_grad_norm", _SWITCH, "the norm is in the log, whether it clips or not"),
    _zero("round_robin_gradients", _SWITCH, "each rank copies the gradients of its own shard"),
    _zero("ignore_unused_parameters", _SWITCH, "a parameter without gradient is not updated"),
    _zero(
        "parameter_alignment",
        _SWITCH,
        "there is no flat buffer: tensors begin where torch aligns them",
    ),
    _zero("grad_hooks", _SWITCH, "always", True),
)

_STAGE_3 = (
    _zero("stage3_prefetch_bucket_size", _NUMBER, f"{_WHOLE_LAYER}, one layer ahead"),
    _zero(
        "stage3_param_persistence_threshold",
        _NUMBER,
        f"{_WHOLE_LAYER}, so small tensors ride along and are sharded like the others",
    ),
    _zero(
        "stage3_model_persistence_threshold",
        _NUMBER,
        "nothing stays whole between its turns",
    ),
    _zero(
        "stage3_max_live_parameters",
        _NUMBER,
        "the layer that computes and the one ahead are whole; the bill has both",
    ),
    _zero("stage3_max_reuse_distance", _NUMBER, "a layer is freed after its turn"),
    _zero("sub_group_size", _NUMBER, _SUBGROUPS),
    _zero("stage3_module_granularity_threshold", _NUMBER, _WHOLE_LAYER),
    _zero("stage3_use_all_reduce_for_fetch_params", _SWITCH, _WHOLE_LAYER),
    _zero("stage3_allgather_sequential", _SWITCH, _WHOLE_LAYER),
    _zero("stage3_gather_16bit_weights_on_model_save", _SWITCH, "checkpoints are always whole"),
    _zero("stage3_gather_fp16_weights_on_model_save", _SWITCH, "checkpoints are always whole"),
    _zero("gather_16bit_weights_on_model_save", _SWITCH, "checkpoints are always whole"),
    _zero("prefetch_bucket_size", _NUMBER, f"{_WHOLE_LAYER}, one layer ahead"),
    _zero("param_persistence_threshold", _NUMBER, f"{_WHOLE_LAYER}; small tensors ride along"),
    _zero("model_persistence_threshold", _NUMBER, "nothing stays whole between its turns"),
    _zero("max_live_parameters", _NUMBER, "the layer that computes and the one ahead are whole"),
    _zero("max_reuse_distance", _NUMBER, "a layer is freed after its turn"),
    _zero(
        "memory_efficient_linear",
        _SWITCH,
        "a freed layer leaves nothing behind, whatever refers to it",
        True,
    ),
    _zero("override_module_apply", _SWITCH, "models are built from their files, not by apply"),
    _zero("log_trace_cache_warnings", _SWITCH, "there is no trace: layers have a fixed order"),
    _zero("enable_sanity_checks", _SWITCH, "there is nothing to switch on"),
    _zero("leaf_module", _BLOCK, f"{_WHOLE_LAYER}, experts with it"),
    _zero(
        "quantized_initialization",
        _BLOCK,
        "quantization_bit: 4 with adapters",
        refused=True,
    ),
)

_QUANTISED = (
    _zero("zero_quantized_weights", _SWITCH, _ZERO_PP),
    _zero(
        "zero_quantized_nontrainable_weights",
        _SWITCH,
        "take finetuning_type: lora with quantization_bit: 4",
        refused=True,
    ),
    _zero("zero_quantized_gradients", _SWITCH, _ZERO_PP),
    _zero("zeropp_loco_param", _BLOCK, _ZERO_PP),
)


def _offload(block: str) -> tuple[Entry, ...]:
    path, own = f"zero_optimization.{block}", block
    return (
        Entry(f"{path}.device", _TEXT, own, words=_PLACES),
        Entry(f"{path}.nvme_path", _TEXT, "offload_folder"),
        Entry(f"{path}.pin_memory", _SWITCH, here=_PINNED, usual=(True,)),
        Entry(f"{path}.buffer_count", _COUNT, here=_DISK),
        Entry(f"{path}.buffer_size", _NUMBER, here=_DISK),
    )


_OFFLOAD = (
    *_offload("offload_optimizer"),
    Entry("zero_optimization.offload_optimizer.ratio", _NUMBER, "offload_optimizer_fraction"),
    *(
        _zero(f"offload_optimizer.{name}", _SWITCH, "reads, updates and writes always overlap")
        for name in ("pipeline_read", "pipeline_write", "pipeline")
    ),
    _zero("offload_optimizer.fast_init", _SWITCH, "states are made in place, on their tier"),
    _zero(
        "offload_optimizer.super_offload",
        _SWITCH,
        "updates go on while the next forward runs (lazy_step), with the same numbers",
    ),
    _zero(
        "offload_optimizer.cpuadam_cores_perc",
        _NUMBER,
        "updates take the cores that the rank has",
    ),
    *_offload("offload_param"),
    _zero(
        "offload_param.max_in_cpu",
        _NUMBER,
        "offload_param_fraction says how much leaves; what is on disk has its buffers on the host",
    ),
    _zero(
        "zenflow",
        _BLOCK,
        "updates are never postponed beyond the next use of a parameter: lazy_step overlaps them "
        "and changes no number",
        refused=True,
    ),
    Entry(
        "zero_optimization.cpu_offload",
        _SWITCH,
        "offload_optimizer",
        "old name of offload_optimizer",
    ),
    Entry(
        "zero_optimization.cpu_offload_params",
        _SWITCH,
        "offload_param",
        "old name of offload_param",
    ),
    Entry(
        "zero_optimization.cpu_offload_param",
        _SWITCH,
        "offload_param",
        "old name of offload_param",
    ),
    _zero("cpu_offload_use_pin_memory", _SWITCH, _PINNED, True),
    _zero("save_muon_momentum_buffer_in_memory", _SWITCH, "of Muon, which is not here"),
)

_CHECKPOINTING = (
    _zero("load_from_fp32_weights", _SWITCH, "masters are read from the checkpoint's fp32", True),
    _zero("elastic_checkpoint", _SWITCH, _CHECKPOINTS),
    _zero("legacy_stage1", _SWITCH, "stage 1 is the same engine with fewer shards"),
    _zero("pipeline_loading_checkpoint", _SWITCH, _CHECKPOINTS),
)

ZERO_ENTRIES = (*_STAGES, *_GRADIENTS, *_STAGE_3, *_QUANTISED, *_OFFLOAD, *_CHECKPOINTING)
