"""Names that people bring from other tools and older versions: accepted, or refused by name.

`translate` turns one source of settings (a file, or the flags) into tightfit's own keys. Knows the
words of Hugging Face, LLaMA-Factory, axolotl and DeepSpeed; knows nothing about files or types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.errors import ConfigError

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "gradient_accumulation": "gradient_accumulation_steps",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "base_model": "model_name_or_path",
    "train_file": "dataset",
    "validation_file": "eval_dataset",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "global_batch_size": "train_batch_size",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "optim",
    "max_length": "cutoff_len",
    "max_seq_length": "cutoff_len",
    "max_seq_len": "cutoff_len",
    "sequence_len": "cutoff_len",
    "model_max_length": "cutoff_len",
    "activation_checkpointing": "gradient_checkpointing",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "modules_to_save": "additional_target",
    "lora_modules_to_save": "additional_target",
    "adapter": "finetuning_type",
    "attn_implementation": "attention",
    "flash_attn": "attention",
    "nproc_per_node": "num_gpus",
    "num_processes": "num_gpus",
    "world_size": "num_gpus",
    "nodes": "nnodes",
    "zero_optimization_stage": "zero_stage",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_stages",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_stages",
    "zero": "zero_stage",
    "ds_stage": "zero_stage",
    "dtype": "precision",
    "torch_dtype": "precision",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
    "activation_offloading": "offload_activations",
    "ratio": "offload_optimizer_fraction",
    "offload_optimizer_ratio": "offload_optimizer_fraction",
    "offload_param_ratio": "offload_param_fraction",
    "nvme_path": "offload_folder",
    "offload_dir": "offload_folder",
}

# Keys of other tools that have no counterpart yet. A value on the left of the text, or one that
# means "off", asks for what happens anyway and is accepted.
NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "tf32": ((), "leave it out"),
    "fsdp": ((), "say zero_stage, or give a file that has it with --config"),
    "packing": ((), "leave it out; every sample is its own sequence"),
    "report_to": (("jsonl",), "the log is `trainer_log.jsonl` in `output_dir`; leave it out"),
    "template": (("default",), "the model's own chat template is used; leave it out"),
    "stage": (
        ("sft",),
        "rows with `text` are trained as plain text whatever the stage; leave it out",
    ),
    "trust_remote_code": ((), "code from a model folder is never run; leave it out"),
    "push_to_hub": ((), "upload `output_dir` with `hf upload`; leave it out"),
    "load_best_model_at_end": ((), "leave it out"),
    "group_by_length": ((), "leave it out"),
    "neftune_noise_alpha": ((), "leave it out"),
}

# Values that other tools allow for a key that tightfit has too.
_SAME_VALUES = {
    ("optim", "adamw_torch"): "adamw",
    ("optim", "adamw_torch_fused"): "adamw",
    ("optim", "adamw_hf"): "adamw",
    ("optim", "adamw_bnb_8bit"): "adamw_8bit",
    ("optim", "paged_adamw_8bit"): "adamw_8bit",
    ("optim", "paged_adamw_32bit"): "adamw",
    ("optim", "paged_adamw"): "adamw",
    ("optim", "adamw_torch_xla"): "adamw",
    ("optim", "adamw_torch_npu_fused"): "adamw",
    ("optim", "lion_32bit"): "lion",
    ("optim", "paged_lion_32bit"): "lion",
    ("optim", "paged_lion_8bit"): "lion_8bit",
    ("optim", "lion_8bit"): "lion_8bit",
    ("finetuning_type", "lora"): "lora",
    ("finetuning_type", "full"): "full",
    ("finetuning_type", "qlora"): "qlora",
    ("gradient_checkpointing", "unsloth"): "true",
    ("attention", "flash_attention_2"): "flash",
    ("attention", "fa2"): "flash",
    ("attention", "disabled"): "eager",
    ("precision", "bfloat16"): "bf16",
    ("precision", "float16"): "fp16",
    ("precision", "float32"): "fp32",
}
_VALUES_NOT_YET = {
    ("finetuning_type", "freeze"): "use full or lora",
    ("finetuning_type", "oft"): "use full or lora",
}

# Switches of other tools that say the value of one of tightfit's keys.
_SWITCHES_FOR = {
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
    "qlora": ("finetuning_type", "qlora"),
    "load_in_4bit": ("quantization_bit", 4),
    "load_in_8bit": ("quantization_bit", 8),
}
SPECIAL = (*_SWITCHES_FOR, "warmup_ratio", "batch_size", "resume_from_checkpoint")
CONFIG_FILES = ("config", "deepspeed")  # settings that name a config of another tool
OTHER_NAMES = (*RENAMED, *NOT_YET, *SPECIAL, *CONFIG_FILES)
SWITCHES = (
    *_SWITCHES_FOR, "tf32", "packing", "activation_offloading", "trust_remote_code",
    "push_to_hub", "load_best_model_at_end", "group_by_length", "activation_checkpointing",
)  # fmt: skip

_OFF = ("", "none", "null", "no", "false", "off", "0", "auto", "disabled")
_ON = ("true", "yes", "on", "1")


def translate(settings: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The same settings under tightfit's own keys; keys that nobody knows are left as they are.

    Args:
        label: what stands before a key in messages, like `--` or `job.yaml: `.

    Raises:
        ConfigError: a key or value is known but not available, or two keys contradict.
    """
    if "warmup_ratio" in settings and str(settings.get("warmup_steps")) == "0":
        settings = {key: value for key, value in settings.items() if key != "warmup_steps"}
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in settings.items():
        if key in CONFIG_FILES:
            continue  # whoever has read them knows what is in them
        for own, meaning in _own_settings(key, value, label):
            if own in result and result[own] != meaning:
                raise ConfigError(
                    f"{label + key} and {label + origin[own]} contradict:"
                    f" both set {own}, to {meaning!r} and {result[own]!r}; keep one"
                )
            result[own], origin[own] = meaning, key
    return result


def _own_settings(key: str, value: Any, label: str) -> list[tuple[str, Any]]:
    """What one setting means: nothing, or one of tightfit's own."""
    name = label + key
    if key in NOT_YET:
        accepted, advice = NOT_YET[key]
        if is_off(value) or str(value) in map(str, accepted):
            return []
        raise ConfigError(f"{name}: {_shown(value)} is not available yet; {advice}")
    if key in SPECIAL:
        return _special(key, value, name)
    key = RENAMED.get(key, key)
    word = value.casefold() if isinstance(value, str) else None
    if word is not None and (key, word) in _VALUES_NOT_YET:
        raise ConfigError(f"{name}: {value} is not available yet; {_VALUES_NOT_YET[key, word]}")
    if key in ("lora_target", "additional_target") and isinstance(value, list):
        value = ",".join(map(str, value))
    return [(key, _SAME_VALUES.get((key, word or ""), value))]


def _special(key: str, value: Any, name: str) -> list[tuple[str, Any]]:
    """Keys whose value changes with the name."""
    if key in _SWITCHES_FOR:
        if _is_on(value):
            return [_SWITCHES_FOR[key]]
        if is_off(value):
            return []
        raise ConfigError(f"{name}: {_shown(value)} is neither true nor false")
    if key == "warmup_ratio":
        return _warmup_steps(value, name)
    if key == "resume_from_checkpoint":
        if _is_on(value) or is_off(value):
            return [("resume", _is_on(value))]
        raise ConfigError(
            f"{name}: a run continues from the last checkpoint in its own `output_dir`;"
            f" give `resume: true` instead of {_shown(value)}"
        )
    raise ConfigError(
        f"{name} can mean two things: give `per_device_train_batch_size` (sequences per forward)"
        " or `train_batch_size` (sequences per optimizer step)"
    )


def _warmup_steps(value: Any, name: str) -> list[tuple[str, Any]]:
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        ratio = -1.0
    if not 0 <= ratio < 1:
        raise ConfigError(f"{name}: {_shown(value)} is not a share of all steps, from 0 to below 1")
    return [("warmup_steps", ratio)] if ratio else []


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    if isinstance(value, str):
        return value.casefold() in _OFF
    return value is None or value is False or value in ([], {})


def _is_on(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.casefold() in _ON)
