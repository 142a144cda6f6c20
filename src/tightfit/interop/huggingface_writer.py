"""Writes a job as transformers' TrainingArguments (JSON) and as LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.interop.deepspeed_writer import deepspeed_content
from tightfit.interop.fsdp_writer import can_be_fsdp, fsdp_content
from tightfit.interop.writing import (
    Sheet,
    Written,
    as_json,
    as_yaml,
    batch_sizes,
    leave_ranks_to,
    remarks,
)

_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_8bit",
    "lion": "lion_32bit",
    "lion_8bit": "lion_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_NEAREST = {"adamw_compact": "adamw_8bit"}  # of what transformers does not have
_SAME = (
    "output_dir", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm",
    "label_smoothing_factor", "seed", "logging_steps", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "save_strategy", "save_steps", "save_total_limit",
    "save_only_model", "ddp_timeout",
)  # fmt: skip
_SAME_IN_FACTORY = (
    "model_name_or_path", "finetuning_type", "quantization_bit", "cutoff_len", "dataset",
    "eval_dataset", "val_size", "resize_vocab", "rope_scaling",
)  # fmt: skip
_LORA = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora",
    "additional_target",
)  # fmt: skip
_KERNELS = {"auto": "auto", "sdpa": "sdpa", "flash": "fa2", "eager": "disabled"}


def write_transformers(keys: Mapping[str, Any]) -> Written:
    """A file that HfArgumentParser(TrainingArguments).parse_json_file loads."""
    sheet = Sheet(keys)
    content = _arguments(sheet)
    checkpointing = sheet.get("gradient_checkpointing")
    content["gradient_checkpointing"] = checkpointing in ("true", "selective")
    if checkpointing == "selective":
        sheet.missing("gradient_checkpointing", "every layer is recomputed, not every second")
    content |= _sharing(sheet)
    leave_ranks_to(sheet, "torchrun --nproc_per_node, --nnodes")
    return Written(as_json(content), tuple(sheet.finish()))


def write_llamafactory(keys: Mapping[str, Any]) -> Written:
    """A file for `llamafactory-cli train`."""
    sheet = Sheet(keys)
    content: dict[str, Any] = {"stage": "sft", "do_train": True}
    content |= {name: sheet.get(name) for name in _SAME_IN_FACTORY if sheet.says(name)}
    content["finetuning_type"] = sheet.get("finetuning_type")
    content["cutoff_len"] = sheet.get("cutoff_len")
    content["template"] = "default"
    if sheet.get("finetuning_type") == "lora":
        content |= {name: sheet.get(name) for name in _LORA if sheet.get(name) is not None}
    content |= _arguments(sheet)
    checkpointing = sheet.get("gradient_checkpointing")
    if checkpointing == "false":
        content["disable_gradient_checkpointing"] = True
    if checkpointing == "selective":
        sheet.missing("gradient_checkpointing", "every layer is recomputed, not every second")
    if sheet.says("attention"):
        content["flash_attn"] = _KERNELS[sheet.get("attention")]
    content |= _sharing(sheet)
    leave_ranks_to(sheet, "FORCE_TORCHRUN=1 with NPROC_PER_NODE and NNODES")
    notes = sheet.finish()
    lines = ["Made by tightfit.", "Take the template of the model's family, and enter the data",
             "set in dataset_info.json.", *remarks(notes)]  # fmt: skip
    return Written(as_yaml(content, lines), tuple(notes))


def _arguments(sheet: Sheet) -> dict[str, Any]:
    """Fields of TrainingArguments; what a job leaves to its defaults is written too, where theirs
    are others."""
    content = {name: sheet.get(name) for name in _SAME if sheet.says(name)}
    content["logging_steps"] = sheet.get("logging_steps")
    content["save_strategy"] = sheet.get("save_strategy")
    if sheet.get("eval_strategy") == "steps":
        content["eval_steps"] = sheet.get("eval_steps")
    if sheet.says("eval_dataset") or sheet.get("val_size"):
        content["per_device_eval_batch_size"] = sheet.get("per_device_eval_batch_size")
    content["optim"] = _optimizer(sheet)
    precision = sheet.get("precision")
    if precision in ("bf16", "fp16"):
        content[precision] = True
    if precision == "auto":
        sheet.missing("precision", "give bf16 or fp16; without them it is fp32")
    micro, steps = batch_sizes(sheet)
    content |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps}
    if sheet.get("resume"):
        content["resume_from_checkpoint"] = True
    return content


def _optimizer(sheet: Sheet) -> str:
    name = sheet.get("optim")
    if name in _NEAREST:
        sheet.missing("optim", f"transformers has no {name}; this is the nearest")
    return _OPTIMIZERS[_NEAREST.get(name, name)]


def _sharing(sheet: Sheet) -> dict[str, Any]:
    """`fsdp` where it can do what the job says, `deepspeed` where only that can, else neither."""
    away = {"cpu", "nvme"} & {sheet.look_at("offload_optimizer"), sheet.look_at("offload_param")}
    stage = sheet.look_at("zero_stage")
    if not away and (sheet.ranks == 1 or stage in ("auto", 0)):
        return {}
    if can_be_fsdp(sheet):
        part = sheet.with_keys(gradient_checkpointing="false")  # the Trainer's own key says it
        return {"fsdp": True, "fsdp_config": fsdp_content(part)}
    return {"deepspeed": deepspeed_content(sheet, own_optimizer=False)}
