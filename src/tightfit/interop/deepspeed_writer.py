"""Writes a job as DeepSpeed's `ds_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.interop.writing import Sheet, Written, as_json, remarks

_OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
_SCHEDULES = {
    "constant_with_warmup": "WarmupLR",
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
}


def write_deepspeed(keys: Mapping[str, Any]) -> Written:
    """A file that DeepSpeed loads; what it cannot say stands in it under `_tightfit`.

    Args:
        keys: that a job says, checked.
    """
    sheet = Sheet(keys)
    content = deepspeed_content(sheet, own_optimizer=True)
    for name in ("num_gpus", "nnodes"):
        if sheet.says(name) and sheet.get(name) != 1:
            sheet.missing(name, "the launcher says it: `deepspeed --num_gpus`, `--num_nodes`")
    notes = sheet.finish()
    if notes:
        content["_tightfit"] = list(remarks(notes))
    return Written(as_json(content), tuple(notes))


def deepspeed_content(sheet: Sheet, *, own_optimizer: bool) -> dict[str, Any]:
    """The blocks of a config.

    Args:
        own_optimizer: whether DeepSpeed makes the optimizer and the schedule; otherwise a trainer
            of transformers does, which fills in what is `auto`.
    """
    content: dict[str, Any] = _batch(sheet) if own_optimizer else _batch_of_trainer()
    content["gradient_clipping"] = sheet.get("max_grad_norm") if own_optimizer else "auto"
    if own_optimizer:
        content |= _optimizer(sheet) | _scheduler(sheet)
        content["steps_per_print"] = sheet.get("logging_steps")
    content |= _precision(sheet) if own_optimizer else _precision_of_trainer()
    content["zero_optimization"] = _zero(sheet)
    content |= _parallel(sheet)
    if sheet.get("offload_activations") == "true":
        content["activation_checkpointing"] = {"cpu_checkpointing": True}
        sheet.missing(
            "offload_activations", "only a model that calls deepspeed.checkpointing does it"
        )
    if own_optimizer and sheet.get("gradient_checkpointing") in ("true", "selective"):
        sheet.missing(
            "gradient_checkpointing", "call model.gradient_checkpointing_enable() in the script"
        )
    return content


def _batch(sheet: Sheet) -> dict[str, Any]:
    """The three sizes; `auto` is filled in by transformers or accelerate."""
    micro = sheet.get("per_device_train_batch_size")
    steps = sheet.get("gradient_accumulation_steps")
    total = sheet.get("train_batch_size")
    if total == "auto" and "auto" not in (micro, steps):
        total = micro * steps * sheet.data_parallel
    sizes = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    return {name: size for name, size in sizes.items() if total == "auto" or size != "auto"}


def _batch_of_trainer() -> dict[str, Any]:
    return dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "auto",
    )


def _optimizer(sheet: Sheet) -> dict[str, Any]:
    name = sheet.get("optim")
    if name not in _OPTIMIZERS:
        sheet.missing("optim", "DeepSpeed has none; give it the optimizer object yourself")
        return {"zero_allow_untested_optimizer": True}
    params: dict[str, Any] = {"lr": sheet.get("learning_rate")}
    params["weight_decay"] = sheet.get("weight_decay")
    betas = [sheet.get("adam_beta1"), sheet.get("adam_beta2")]
    epsilon = sheet.get("adam_epsilon")
    if name != "sgd":
        params["betas"] = betas
    if name == "adamw":
        params["eps"] = epsilon
    return {"optimizer": {"type": _OPTIMIZERS[name], "params": params}}


def _scheduler(sheet: Sheet) -> dict[str, Any]:
    name, total = sheet.get("lr_scheduler_type"), sheet.get("max_steps")
    warmup = sheet.get("warmup_steps")
    if not sheet.says("lr_scheduler_type") and not warmup:
        return {}
    if 0 < warmup < 1 and total > 0:
        warmup = round(warmup * total)
    needs_total = name in ("linear", "cosine") or 0 < warmup < 1
    if name not in _SCHEDULES or (needs_total and total <= 0):
        why = "DeepSpeed has no such schedule" if name not in _SCHEDULES else (
            "DeepSpeed needs the number of steps (max_steps)"
        )  # fmt: skip
        sheet.missing("lr_scheduler_type", f"{why}; make the schedule in the script")
        return {}
    params: dict[str, Any] = {"warmup_num_steps": int(warmup), "warmup_type": "linear"}
    if name == "cosine":
        params |= {"total_num_steps": total, "warmup_min_ratio": 0, "cos_min_ratio": 0}
    else:
        params |= {"warmup_min_lr": 0, "warmup_max_lr": sheet.get("learning_rate")}
    if name == "linear":
        params["total_num_steps"] = total
    return {"scheduler": {"type": _SCHEDULES[name], "params": params}}


def _precision(sheet: Sheet) -> dict[str, Any]:
    precision = sheet.get("precision")
    if precision == "fp32":
        return {}
    if precision == "auto":
        return _precision_of_trainer()
    return {precision: {"enabled": True}}


def _precision_of_trainer() -> dict[str, Any]:
    return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def _zero(sheet: Sheet) -> dict[str, Any]:
    optimizer, parameters = _place(sheet, "offload_optimizer"), _place(sheet, "offload_param")
    fraction = sheet.get("offload_optimizer_fraction")
    block: dict[str, Any] = {"stage": _stage(sheet, optimizer, parameters, fraction)}
    folder = sheet.get("offload_folder") or "offload"
    if optimizer != "none":
        block["offload_optimizer"] = {"device": optimizer, "pin_memory": True}
        if optimizer == "nvme":
            block["offload_optimizer"]["nvme_path"] = folder
        if fraction not in ("auto", 1):
            if optimizer == "cpu":
                block["offload_optimizer"]["ratio"] = fraction
            else:
                sheet.missing("offload_optimizer_fraction", "all states go to the disk")
    if parameters != "none":
        block["offload_param"] = {"device": parameters, "pin_memory": True}
        if parameters == "nvme":
            block["offload_param"]["nvme_path"] = folder
    if block["stage"] == 3:
        block["stage3_gather_16bit_weights_on_model_save"] = True
    block["overlap_comm"] = True
    block["contiguous_gradients"] = True
    return block


def _place(sheet: Sheet, name: str) -> str:
    place: str = sheet.get(name)
    if place == "auto" and name in sheet.keys:
        sheet.missing(name, "DeepSpeed does not choose: states and parameters stay on the device")
    return "none" if place == "auto" else place


def _stage(sheet: Sheet, optimizer: str, parameters: str, fraction: Any) -> int:
    """The job's, or the least that DeepSpeed's offload needs."""
    wanted = sheet.get("zero_stage")
    stage = 0 if wanted == "auto" else int(wanted)
    least = 2 if optimizer != "none" else 0
    if parameters != "none" or "nvme" in (optimizer, parameters) or fraction not in ("auto", 1):
        least = 3
    if optimizer != "none" and stage == 1 and least < 3:
        least = 1
    if stage < least:
        sheet.missing("zero_stage", f"stage {least} is the first in which DeepSpeed offloads this")
    return max(stage, least)


def _parallel(sheet: Sheet) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if sheet.size("tensor_parallel_size") > 1:
        content["tensor_parallel"] = {"autotp_size": sheet.size("tensor_parallel_size")}
    if sheet.size("pipeline_parallel_size") > 1:
        content["pipeline"] = {"stages": sheet.size("pipeline_parallel_size")}
        sheet.missing(
            "pipeline_parallel_size", "DeepSpeed has stages for a PipelineModule of your own only"
        )
    if sheet.size("data_parallel_replicas") > 1:
        sheet.missing(
            "data_parallel_replicas", "DeepSpeed shares states out over all ranks (no HSDP)"
        )
    return content
