"""Writes a job as DeepSpeed's `ds_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.interop.writing import Sheet, Written, as_json, leave_ranks_to, remarks

_OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
_LOSS_SCALE = (
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
)  # fmt: skip
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
    leave_ranks_to(sheet, "`deepspeed --num_gpus`, `--num_nodes`")
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
    content["zero_optimization"] = zero_block(sheet)
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
    if name != "sgd":
        params["betas"] = [sheet.get("adam_beta1"), sheet.get("adam_beta2")]
    if name == "adamw":
        params["eps"] = sheet.get("adam_epsilon")
    return {"optimizer": {"type": _OPTIMIZERS[name], "params": params}}


def _scheduler(sheet: Sheet) -> dict[str, Any]:
    name, total = sheet.look_at("lr_scheduler_type"), sheet.look_at("max_steps")
    warmup = sheet.look_at("warmup_steps")
    if "lr_scheduler_type" not in sheet.keys and not warmup:
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
    for key in ("lr_scheduler_type", "warmup_steps"):
        sheet.get(key)
    params: dict[str, Any] = {"warmup_num_steps": int(warmup), "warmup_type": "linear"}
    if name == "cosine":
        params |= {"warmup_min_ratio": 0, "cos_min_ratio": 0}
    else:
        params |= {"warmup_min_lr": 0, "warmup_max_lr": sheet.get("learning_rate")}
    if name in ("linear", "cosine"):
        params["total_num_steps"] = sheet.get("max_steps")
    return {"scheduler": {"type": _SCHEDULES[name], "params": params}}


def _precision(sheet: Sheet) -> dict[str, Any]:
    precision = sheet.get("precision")
    if precision == "fp32":
        return {}
    if precision == "auto":
        return _precision_of_trainer()
    block = {"enabled": True}
    if precision == "fp16":
        block |= {name: sheet.get(name) for name in _LOSS_SCALE if sheet.says(name)}
    return {precision: block}


def _precision_of_trainer() -> dict[str, Any]:
    return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def zero_block(sheet: Sheet) -> dict[str, Any]:
    """What is shared out and where it lives: the block `zero_optimization`."""
    optimizer, parameters = _place(sheet, "offload_optimizer"), _place(sheet, "offload_param")
    fraction = _fraction(sheet, optimizer)
    block: dict[str, Any] = {"stage": _stage(sheet, optimizer, parameters, fraction)}
    for name, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if device != "none":
            block[name] = {"device": device, "pin_memory": True}
        if device == "nvme":
            block[name]["nvme_path"] = sheet.get("offload_folder") or "offload"
    if fraction != 1:
        block["offload_optimizer"]["ratio"] = fraction
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


def _fraction(sheet: Sheet, optimizer: str) -> float:
    """Of the states that leave; DeepSpeed divides those on the host only."""
    name = "offload_optimizer_fraction"
    fraction = sheet.look_at(name)
    if fraction in ("auto", 1) or optimizer == "none":
        return 1
    if optimizer == "nvme":
        sheet.missing(name, "all states go to the disk")
        return 1
    return float(sheet.get(name))


def _stage(sheet: Sheet, optimizer: str, parameters: str, fraction: float) -> int:
    """The job's, or the least that DeepSpeed's offload needs."""
    wanted = sheet.get("zero_stage")
    stage = 0 if wanted == "auto" else int(wanted)
    least = 2 if optimizer != "none" else 0
    if parameters != "none" or "nvme" in (optimizer, parameters) or fraction != 1:
        least = 3
    if optimizer != "none" and stage == 1 and least < 3:
        least = 1
    if stage < least:
        sheet.missing("zero_stage", f"stage {least} is the first in which DeepSpeed offloads this")
    return max(stage, least)


def _parallel(sheet: Sheet) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if sheet.size("tensor_parallel_size") > 1:
        content["tensor_parallel"] = {"autotp_size": sheet.get("tensor_parallel_size")}
    if sheet.size("pipeline_parallel_size") > 1:
        content["pipeline"] = {"stages": sheet.size("pipeline_parallel_size")}
        sheet.missing(
            "pipeline_parallel_size", "DeepSpeed has stages for a PipelineModule of your own only"
        )
    return content
