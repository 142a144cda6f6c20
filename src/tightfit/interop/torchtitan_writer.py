"""Writes a job as torchtitan's TOML, as version 0.2 reads it.

torchtitan shares out every way that this engine does but in ZeRO-1, in 16 bits or fp32, and trains
all parameters of a model that is named by a flavor of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tightfit.interop.fsdp_writer import offloads_all
from tightfit.interop.writing import Sheet, Written, batch_sizes, leave_ranks_to, remarks

_Content = dict[str, dict[str, Any]]

_SAME: dict[str, dict[str, str]] = {
    "optimizer": {
        "lr": "learning_rate",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "eps": "adam_epsilon",
        "weight_decay": "weight_decay",
    },
    "training": {"seq_len": "cutoff_len", "max_norm": "max_grad_norm"},
    "metrics": {"log_freq": "logging_steps"},
    "debug": {"seed": "seed"},
    "parallelism": {
        "tensor_parallel_degree": "tensor_parallel_size",
        "pipeline_parallel_degree": "pipeline_parallel_size",
    },
}
_DECAYS = ("linear", "cosine")
_MODES = {"true": "full", "selective": "selective"}
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_NEVER = "torchtitan has no {}: this is {}"


def write_torchtitan(keys: Mapping[str, Any]) -> Written:
    """A file for torchtitan's `--job.config_file`."""
    sheet = Sheet(keys)
    content: _Content = {
        block: {name: sheet.get(own) for name, own in pairs.items() if sheet.get(own) != "auto"}
        for block, pairs in _SAME.items()
    }
    content["optimizer"] = {"name": _optimizer(sheet), **content["optimizer"]}
    content["training"] |= _training(sheet)
    content["parallelism"] |= _batch_and_ranks(sheet, content["training"])
    content["lr_scheduler"] = _schedule(sheet)
    content["activation_checkpoint"] = _checkpointing(sheet)
    content["checkpoint"] = _saving(sheet)
    notes = sheet.finish()
    lines = ["Made by tightfit.", "Name the model by its name and flavor in [model].",
             *remarks(notes)]  # fmt: skip
    return Written(_as_toml(content, lines), tuple(notes))


def _optimizer(sheet: Sheet) -> str:
    if sheet.get("optim") != "adamw":
        sheet.missing("optim", _NEVER.format("such optimizer", "AdamW"))
    return "AdamW"


def _training(sheet: Sheet) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if sheet.get("max_steps") > 0:
        content["steps"] = sheet.get("max_steps")
    if sheet.says("num_train_epochs"):
        sheet.missing("num_train_epochs", "torchtitan counts steps: training.steps")
    content["enable_cpu_offload"] = offloads_all(sheet)
    precision = sheet.get("precision")
    if precision == "fp16":
        sheet.missing("precision", _NEVER.format("fp16", "bfloat16"))
    content["mixed_precision_param"] = "float32" if precision == "fp32" else "bfloat16"
    if sheet.look_at("finetuning_type") == "lora":
        sheet.missing("finetuning_type", "torchtitan trains all parameters")
    return content


def _batch_and_ranks(sheet: Sheet, training: dict[str, Any]) -> dict[str, Any]:
    """The batch goes into `training`. Of a pipeline's the local one is all that a step takes."""
    micro, steps = batch_sizes(sheet)
    staged = sheet.size("pipeline_parallel_size") > 1
    training["local_batch_size"] = micro * steps if staged else micro
    training["global_batch_size"] = micro * steps * sheet.data_parallel
    content = _data_parallel(sheet)
    if staged:
        content["pipeline_parallel_microbatch_size"] = micro
        content["pipeline_parallel_schedule"] = _SCHEDULES[sheet.get("pipeline_schedule")]
    leave_ranks_to(sheet, "torchrun --nproc_per_node, --nnodes")
    return content


def _data_parallel(sheet: Sheet) -> dict[str, Any]:
    """Replicas and shards; -1 are all ranks that are left."""
    stage = sheet.get("zero_stage")
    if stage == 0:
        return {
            "data_parallel_replicate_degree": sheet.data_parallel,
            "data_parallel_shard_degree": 1,
        }
    if stage == 1:
        sheet.missing("zero_stage", _NEVER.format("ZeRO-1", "stage 2"))
    replicas = sheet.get("data_parallel_replicas")
    return {
        "data_parallel_replicate_degree": 1 if replicas == "auto" else replicas,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "always" if stage in ("auto", 3) else "never",
    }


def _schedule(sheet: Sheet) -> dict[str, Any]:
    decay, warmup = sheet.get("lr_scheduler_type"), sheet.get("warmup_steps")
    steps = sheet.look_at("max_steps")
    if 0 < warmup < 1 and steps <= 0:
        sheet.missing("warmup_steps", "a part of all steps, which the job does not count: 0")
        warmup = 0
    content = {"warmup_steps": math.ceil(warmup * steps) if 0 < warmup < 1 else int(warmup)}
    if decay not in _DECAYS:
        sheet.missing("lr_scheduler_type", _NEVER.format("such schedule", "linear"))
        decay = "linear"
    return {**content, "decay_type": decay}


def _checkpointing(sheet: Sheet) -> dict[str, Any]:
    mode = _MODES.get(sheet.get("gradient_checkpointing"), "none")
    return {"mode": mode, "selective_ac_option": "2"} if mode == "selective" else {"mode": mode}


def _saving(sheet: Sheet) -> dict[str, Any]:
    strategy = sheet.get("save_strategy")
    if strategy == "epoch":
        sheet.missing("save_strategy", "torchtitan counts steps: checkpoint.interval")
    content: dict[str, Any] = {"enable": strategy != "no"}
    if strategy == "steps":
        content["interval"] = sheet.get("save_steps")
    return content


def _as_toml(content: _Content, lines: list[str]) -> str:
    """Blocks of numbers, switches and words, which TOML writes as JSON does."""
    text = "".join(f"# {line}\n" for line in lines)
    for block, values in content.items():
        text += f"\n[{block}]\n"
        text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    return text
