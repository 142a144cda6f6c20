"""Reads torchtitan's TOML, which versions 0.1 and 0.2 have; later ones are configured in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.interop.documents import Document
from tightfit.interop.entries import Accepts, Entry, entries_in, table_of
from tightfit.interop.reading import Reading, Tool
from tightfit.interop.translation import Ranks, Translation

_SWITCH, _COUNT, _NUMBER, _TEXT = Accepts.SWITCH, Accepts.COUNT, Accepts.NUMBER, Accepts.TEXT
_BLOCK = Accepts.ANYTHING
_CHECKPOINTS = "checkpoints hold whole tensors in Hugging Face's layout, in output_dir"
_COMPILED = "layers are not compiled"
_SEQUENCES = "a sequence is not shared out over ranks"

_SAME = {
    "training.seq_len": (_COUNT, "cutoff_len"),
    "training.max_norm": (_NUMBER, "max_grad_norm"),
    "training.steps": (_COUNT, "max_steps"),
    "training.seed": (_COUNT, "seed"),
    "debug.seed": (_COUNT, "seed"),
    "parallelism.tensor_parallel_degree": (_COUNT, "tensor_parallel_size"),
    "parallelism.pipeline_parallel_degree": (_COUNT, "pipeline_parallel_size"),
    "optimizer.lr": (_NUMBER, "learning_rate"),
    "optimizer.beta1": (_NUMBER, "adam_beta1"),
    "optimizer.beta2": (_NUMBER, "adam_beta2"),
    "optimizer.eps": (_NUMBER, "adam_epsilon"),
    "optimizer.weight_decay": (_NUMBER, "weight_decay"),
    "lr_scheduler.warmup_steps": (_COUNT, "warmup_steps"),
    "metrics.log_freq": (_COUNT, "logging_steps"),
    "checkpoint.interval": (_COUNT, "save_steps"),
}
# What torchtitan takes where a file says nothing.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "training.steps": {"max_steps": 10000},
    "optimizer.lr": {"learning_rate": 8e-4},
    "optimizer.beta2": {"adam_beta2": 0.95},
    "optimizer.weight_decay": {"weight_decay": 0.1},
    "lr_scheduler.warmup_steps": {"warmup_steps": 200},
    "metrics.log_freq": {"logging_steps": 10},
    "activation_checkpoint.mode": {"gradient_checkpointing": "selective"},  # every second layer
}

_LOCAL_BATCHES = ("training.local_batch_size", "training.batch_size")
_LOCAL_BATCH = 8  # where a file says nothing
_MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"

TORCHTITAN_TABLE = table_of(
    tuple(Entry(key, accepts, own) for key, (accepts, own) in _SAME.items()),
    (
        *(
            Entry(
                key,
                _COUNT,
                "per_device_train_batch_size",
                "with stages all micro-batches of a step: gradient_accumulation_steps",
            )
            for key in _LOCAL_BATCHES
        ),
        Entry(_MICRO_BATCH, _COUNT, "per_device_train_batch_size", "only with stages"),
        Entry("training.global_batch_size", _NUMBER, "train_batch_size", "-1: whatever follows"),
        Entry("training.enable_cpu_offload", _SWITCH, "offload_param, offload_optimizer"),
        Entry(
            "training.mixed_precision_param",
            _TEXT,
            "precision",
            "parameters are in 16 bits themselves, with fp32 masters; there they are fp32 and "
            "gathered in 16 bits",
            words=("bfloat16", "float32"),
        ),
        Entry("training.mixed_precision_reduce", _TEXT, here="gradients travel as they are"),
        Entry("training.dtype", _TEXT, here="precision says it", usual=("float32",)),
        Entry("training.dataset", _TEXT, here="dataset is a file of rows"),
        Entry("training.dataset_path", _TEXT, here="dataset is a file of rows"),
        Entry("training.compile", _BLOCK, here=_COMPILED),
        Entry("training.gc_freq", _COUNT, here="garbage collection is Python's"),
        Entry("training.gc_debug", _SWITCH, here="garbage collection is Python's"),
        Entry("training.deterministic", _SWITCH, here="torch's setting is left alone"),
        Entry("parallelism.data_parallel_replicate_degree", _COUNT, "data_parallel_replicas"),
        Entry("parallelism.data_parallel_shard_degree", _NUMBER, "zero_stage"),
        Entry(
            "parallelism.fsdp_reshard_after_forward",
            _TEXT,
            "zero_stage",
            words=("default", "always", "never"),
        ),
        Entry("parallelism.pipeline_parallel_schedule", _TEXT, "pipeline_schedule"),
        *(
            Entry(f"parallelism.{name}", _COUNT, here=here, usual=(1,), refused=True)
            for name, here in (
                ("context_parallel_degree", _SEQUENCES),
                ("expert_parallel_degree", "experts are shared out by zero_stage"),
                ("expert_tensor_parallel_degree", "experts are shared out by zero_stage"),
            )
        ),
        *(
            Entry(f"parallelism.{name}", _BLOCK, here=here)
            for name, here in (
                ("enable_compiled_autograd", _COMPILED),
                ("enable_async_tensor_parallel", _COMPILED),
                ("disable_loss_parallel", "the loss is computed in chunks or slices, or whole"),
                ("pipeline_parallel_split_points", "pipeline_layers cuts the model"),
                ("module_fqns_per_model_part", "pipeline_layers cuts the model"),
                ("pipeline_parallel_first_stage_less_layers", "pipeline_layers cuts the model"),
                ("pipeline_parallel_last_stage_less_layers", "pipeline_layers cuts the model"),
                ("pipeline_parallel_layers_per_stage", "pipeline_layers cuts the model"),
                ("pipeline_parallel_schedule_csv", "schedules are 1f1b, gpipe and interleaved"),
                ("context_parallel_rotate_method", _SEQUENCES),
                ("enable_sequence_parallel", _SEQUENCES),
            )
        ),
        Entry("optimizer.name", _TEXT, "optim", words=("AdamW", "Adam")),
        Entry("optimizer.implementation", _TEXT, here="the update is always one fused pass"),
        Entry("optimizer.fused", _SWITCH, here="the update is always one fused pass"),
        Entry(
            "optimizer.early_step_in_backward",
            _SWITCH,
            here="gradients are clipped by the norm of all, which is known after backward only",
            refused=True,
        ),
        Entry("lr_scheduler.decay_type", _TEXT, "lr_scheduler_type"),
        Entry(
            "lr_scheduler.decay_ratio",
            _NUMBER,
            here="the rate falls from the end of warmup on",
            usual=(1,),
        ),
        Entry("lr_scheduler.lr_min", _NUMBER, here="the rate ends at 0", usual=(0,)),
        Entry("lr_scheduler.min_lr_factor", _NUMBER, here="the rate ends at 0", usual=(0,)),
        Entry("activation_checkpoint.mode", _TEXT, "gradient_checkpointing"),
        Entry("activation_checkpoint.selective_ac_option", _TEXT, "gradient_checkpointing"),
        *(
            Entry(f"activation_checkpoint.{name}", _BLOCK, here="each layer is one")
            for name in (
                "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop",
                "memory_budget", "visualize_memory_budget_pareto", "preserve_rng_state",
                "determinism_check", "debug",
            )
        ),
        Entry("checkpoint.enable", _SWITCH, "save_strategy"),
        Entry("checkpoint.enable_checkpoint", _SWITCH, "save_strategy"),
        *(
            Entry(f"checkpoint.{name}", _BLOCK, here=_CHECKPOINTS)
            for name in (
                "folder", "initial_load_path", "initial_load_model_only", "initial_load_in_hf",
                "last_save_model_only", "last_save_in_hf", "export_dtype", "async_mode",
                "create_seed_checkpoint", "keep_latest_k", "load_step", "exclude_from_loading",
                "enable_first_step_checkpoint", "enable_ft_dataloader_checkpoints", "load_only",
                "interval_type", "model_weights_only",
            )
        ),
        Entry("model", _BLOCK, here="model_name_or_path is a folder or a name on the Hub"),
        Entry("job", _BLOCK, here="output_dir is where output goes"),
        Entry("compile", _BLOCK, here=_COMPILED),
        Entry("comm", _BLOCK, here="ddp_timeout says how long ranks wait"),
        *(
            Entry(name, _BLOCK, here="the report and the log are in output_dir")
            for name in ("profiling", "metrics.enable_tensorboard", "metrics.enable_wandb",
                         "metrics.disable_color_printing", "metrics.save_tb_folder",
                         "metrics.save_for_all_ranks", "metrics.rank_0_only", "debug.print_config",
                         "memory_estimation")
        ),
        *(
            Entry(name, _BLOCK, here="leave it out", refused=True)
            for name in ("float8", "mx", "quantize")
        ),
        Entry("fault_tolerance", _BLOCK, here="max_restarts starts ranks again"),
        Entry("validation", _BLOCK, here="eval_dataset, val_size and eval_steps evaluate"),
        Entry("experimental", _BLOCK, here="leave it out"),
    ),
)  # fmt: skip


def read_torchtitan(document: Document, ranks: Ranks) -> Reading:
    """The job's keys that a TOML file for torchtitan says.

    Raises:
        ConfigError: a key or value is unknown, or two contradict.
        UnsupportedError: it asks for what makes another run and cannot be had here.
    """
    translation = Translation(entries_in(document, TORCHTITAN_TABLE, "torchtitan"), ranks)
    for key, (_, own) in _SAME.items():
        translation.copy(key, own)
    _batch(translation)
    _precision(translation)
    _optimizer(translation)
    stage = _sharding(translation)
    _checkpointing(translation)
    for key, default in _DEFAULTS.items():
        if not translation.has(key) and not default.keys() & translation.keys.keys():
            translation.imply(f"{key} where it is left out", **default)
    translation.finish()
    tool = Tool("torchtitan", "fsdp2" if stage else "ddp", keep_layers=stage == 2)
    return Reading.of(translation, document, "torchtitan", tool)


def _batch(translation: Translation) -> None:
    """A pipeline cuts the local batch into micro-batches; without one it is one."""
    key = "training.global_batch_size"
    total = translation.take(key) or -1
    if total > 0:
        translation.become(key, train_batch_size=int(total))
    said = {key: translation.take(key) for key in _LOCAL_BATCHES}
    local = {key: size for key, size in said.items() if size is not None}
    if (translation.take("parallelism.pipeline_parallel_degree") or 1) > 1:
        _staged_batch(translation, local, accumulates=total <= 0)
        return
    for key, size in local.items():
        translation.become(key, per_device_train_batch_size=size)
    if not local:
        translation.imply(
            f"local_batch_size is {_LOCAL_BATCH}", per_device_train_batch_size=_LOCAL_BATCH
        )


def _staged_batch(translation: Translation, local: Mapping[str, int], *, accumulates: bool) -> None:
    """The sizes of micro-batches, and how many of them a step takes.

    Args:
        local: the sizes of the local batch, by the keys that say them.
        accumulates: whether it is all that a step takes.

    Raises:
        UnsupportedError: it is no whole number of micro-batches.
    """
    micro = translation.take(_MICRO_BATCH)
    if micro is not None:
        translation.become(_MICRO_BATCH, per_device_train_batch_size=micro)
    else:
        micro = 1
        translation.imply("micro-batches of stages are of one", per_device_train_batch_size=micro)
    for key, size in local.items():
        steps, rest = divmod(size, micro)
        if rest:
            raise translation.refuse(key, f"take a multiple of {_MICRO_BATCH}, {micro}")
        if accumulates:
            translation.become(key, gradient_accumulation_steps=steps)
        else:
            translation.say(key, "", "a step takes the global batch")
    if accumulates and not local:
        translation.imply(
            f"local_batch_size is {_LOCAL_BATCH}", gradient_accumulation_steps=_LOCAL_BATCH // micro
        )


def _precision(translation: Translation) -> None:
    key = "training.mixed_precision_param"
    word = translation.take(key)
    if word is None:
        translation.imply("mixed_precision_param is bfloat16", precision="bf16")
    else:
        translation.become(key, precision="bf16" if word == "bfloat16" else "fp32")
    if translation.take("training.enable_cpu_offload"):
        translation.become("training.enable_cpu_offload", offload_param="cpu",
                           offload_optimizer="cpu")  # fmt: skip
    else:
        translation.imply("without enable_cpu_offload nothing leaves the device",
                          offload_param="none", offload_optimizer="none")  # fmt: skip


def _optimizer(translation: Translation) -> None:
    if translation.take("optimizer.name") is not None:
        translation.become("optimizer.name", optim="adamw")
    key = "lr_scheduler.decay_type"
    decay = translation.take(key)
    if decay is None:
        return
    if decay not in ("linear", "cosine"):
        raise translation.refuse(key, "take linear or cosine")
    translation.become(key, lr_scheduler_type=decay)


def _sharding(translation: Translation) -> int:
    """Replicas, stage and schedule; the stage that they come to."""
    copies = translation.take("parallelism.data_parallel_replicate_degree") or 1
    shard = translation.take("parallelism.data_parallel_shard_degree")
    reshard = translation.take("parallelism.fsdp_reshard_after_forward")
    stage = 2 if reshard == "never" else 3
    if shard == 1:
        stage = 0
        translation.become("parallelism.data_parallel_shard_degree", zero_stage=0)
    elif reshard is not None:
        translation.become("parallelism.fsdp_reshard_after_forward", zero_stage=stage)
    else:
        translation.imply("parameters are shared out unless told otherwise", zero_stage=stage)
    if copies > 1 and stage:
        key = "parallelism.data_parallel_replicate_degree"
        translation.become(key, data_parallel_replicas=copies)
    key = "parallelism.pipeline_parallel_schedule"
    schedule = translation.take(key)
    if schedule is not None:
        name = schedule.casefold().replace("interleaved1f1b", "interleaved")
        if name not in ("1f1b", "gpipe", "interleaved"):
            raise translation.refuse(key, "take 1F1B, Interleaved1F1B or GPipe")
        translation.become(key, pipeline_schedule=name)
    return stage


def _checkpointing(translation: Translation) -> None:
    key = "activation_checkpoint.mode"
    mode = translation.take(key)
    words = {"none": "false", "full": "true", "selective": "selective"}
    if mode is not None:
        if mode not in words:
            raise translation.refuse(key, "take none, selective or full")
        option = translation.take("activation_checkpoint.selective_ac_option")
        why = "every second layer; there it may be single operations"
        translation.become(
            key, why if mode == "selective" and option != "2" else "",
            gradient_checkpointing=words[mode],
        )  # fmt: skip
        if option is not None:
            translation.say("activation_checkpoint.selective_ac_option", "", "")
    for key in ("checkpoint.enable", "checkpoint.enable_checkpoint"):
        switched = translation.take(key)
        if switched is not None:
            translation.become(key, save_strategy="steps" if switched else "no")
