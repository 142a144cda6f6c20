"""Writes a job as accelerate's YAML: FSDP 2 where it can do what the job says, else DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.interop.deepspeed_writer import zero_block
from tightfit.interop.fsdp_writer import can_be_fsdp, fsdp_content
from tightfit.interop.writing import Sheet, Written, as_yaml, remarks

_PARALLEL = "parallelism_config_"


def write_accelerate(keys: Mapping[str, Any]) -> Written:
    """A file for `accelerate launch --config_file`.

    Args:
        keys: that a job says, checked.
    """
    sheet = Sheet(keys)
    kind = _kind(sheet)
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "downcast_bf16": "no",
        "machine_rank": sheet.get("node_rank"),
        "main_training_function": "main",
        "mixed_precision": _precision(sheet),
        "num_machines": sheet.get("nnodes"),
        "num_processes": sheet.get("num_gpus") * sheet.get("nnodes"),
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if sheet.says("master_addr"):
        content["main_process_ip"] = sheet.get("master_addr")
    if sheet.says("master_port"):
        content["main_process_port"] = sheet.get("master_port")
    if kind == "DEEPSPEED":
        content["deepspeed_config"] = _deepspeed(sheet)
    if kind == "FSDP":
        block = fsdp_content(sheet)
        block["offload_params"] = block.pop("cpu_offload")
        content["fsdp_config"] = {f"fsdp_{name}": value for name, value in block.items()}
        content |= _parallel(sheet)
    notes = sheet.finish()
    return Written(as_yaml(content, ["Made by tightfit.", *remarks(notes)]), tuple(notes))


def _kind(sheet: Sheet) -> str:
    stage = sheet.look_at("zero_stage")
    away = {"cpu", "nvme"} & {sheet.look_at("offload_optimizer"), sheet.look_at("offload_param")}
    if not away and sheet.ranks == 1:
        return "NO"
    if not away and stage == 0:
        return "MULTI_GPU"
    return "FSDP" if can_be_fsdp(sheet) else "DEEPSPEED"


def _precision(sheet: Sheet) -> str:
    precision: str = sheet.get("precision")
    if precision == "auto":
        sheet.missing("precision", "accelerate does not choose: fp32")
    return {"fp32": "no", "auto": "no"}.get(precision, precision)


def _deepspeed(sheet: Sheet) -> dict[str, Any]:
    """In accelerate's own words for DeepSpeed's keys."""
    zero = zero_block(sheet)
    block: dict[str, Any] = {
        "zero_stage": zero["stage"],
        "gradient_clipping": sheet.get("max_grad_norm"),
        "zero3_init_flag": zero["stage"] == 3,
        "zero3_save_16bit_model": zero["stage"] == 3,
    }
    if sheet.says("gradient_accumulation_steps"):
        block["gradient_accumulation_steps"] = sheet.get("gradient_accumulation_steps")
    for name in ("offload_optimizer", "offload_param"):
        place = zero.get(name, {"device": "none"})
        block[f"{name}_device"] = place["device"]
        if "nvme_path" in place:
            block[f"{name}_nvme_path"] = place["nvme_path"]
        if "ratio" in place:
            sheet.missing(
                "offload_optimizer_fraction",
                "accelerate has no word for DeepSpeed's ratio; it is in a ds_config.json",
            )
    return block


def _parallel(sheet: Sheet) -> dict[str, Any]:
    copies, tensor = sheet.size("data_parallel_replicas"), sheet.size("tensor_parallel_size")
    if copies == 1 and tensor == 1:
        return {}
    for name in ("data_parallel_replicas", "tensor_parallel_size"):
        sheet.get(name)
    sizes = {
        "dp_replicate_size": copies,
        "dp_shard_size": max(1, sheet.data_parallel // copies),
        "tp_size": tensor,
    }
    return {"parallelism_config": {_PARALLEL + name: size for name, size in sizes.items()}}
