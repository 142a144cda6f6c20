"""Writes a job's sharding as FSDP's keys, for accelerate and for transformers' `fsdp_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.interop.fsdp import STRATEGIES
from tightfit.interop.writing import Sheet, Written, as_json


def write_fsdp(keys: Mapping[str, Any]) -> Written:
    """A file for transformers' `--fsdp --fsdp_config FILE`: version 2."""
    sheet = Sheet(keys)
    return Written(as_json(fsdp_content(sheet)), tuple(sheet.finish()))


def write_fsdp1(keys: Mapping[str, Any]) -> Written:
    """The same for version 1, which has a name for each kind of sharding."""
    sheet = Sheet(keys)
    strategy = _strategy(sheet)
    # accelerate has the first key, transformers the second for the same name.
    content = {"version": 1, "sharding_strategy": strategy, "reshard_after_forward": strategy}
    content["sync_module_states"] = True  # from the rank that reads the model
    return Written(as_json(content | _shared_content(sheet)), tuple(sheet.finish()))


def can_be_fsdp(sheet: Sheet) -> bool:
    """Whether FSDP can place and share out what the job says as it says it: all or nothing."""
    optimizer, parameters = sheet.look_at("offload_optimizer"), sheet.look_at("offload_param")
    fractions = [sheet.look_at(f"offload_{what}_fraction") for what in ("optimizer", "param")]
    places = {"none" if place == "auto" else place for place in (optimizer, parameters)}
    whole = all(fraction in ("auto", 1) for fraction in fractions)
    return whole and len(places) == 1 and "nvme" not in places and sheet.look_at("zero_stage") != 1


def fsdp_content(sheet: Sheet) -> dict[str, Any]:
    """FSDP2's keys, without prefix."""
    stage = sheet.get("zero_stage")
    if stage in (0, 1) and sheet.ranks > 1:
        sheet.missing("zero_stage", "FSDP2 shares gradients out too: this is stage 2")
    content = _shared_content(sheet)
    frees = stage in ("auto", 3) or (content["cpu_offload"] and stage != 2)
    return {"version": 2, "reshard_after_forward": frees, **content}


def _strategy(sheet: Sheet) -> str:
    """Version 1's name for what is shared out, and for whole copies where each machine has one."""
    stage = sheet.get("zero_stage")
    if stage == 1:
        sheet.missing("zero_stage", "FSDP shares gradients out too: this is stage 2")
    stage = {"auto": 3, 1: 2}.get(stage, stage)
    copies = sheet.size("data_parallel_replicas")
    has_copies = copies > 1 and copies == sheet.look_at("nnodes") and stage != 0
    if has_copies:
        sheet.get("data_parallel_replicas")
    return next(name for name, meant in STRATEGIES.items() if meant == (stage, has_copies))


def _shared_content(sheet: Sheet) -> dict[str, Any]:
    """What both versions have the same keys for."""
    content: dict[str, Any] = {
        "cpu_offload": offloads_all(sheet),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": True,
    }
    checkpointing = sheet.get("gradient_checkpointing")
    if checkpointing in ("true", "selective"):
        content["activation_checkpointing"] = True
    if checkpointing == "selective":
        sheet.missing("gradient_checkpointing", "every layer is recomputed, not every second")
    return content


def offloads_all(sheet: Sheet) -> bool:
    """Whether parameters, gradients and states live on the host; FSDP has nothing in between."""
    parameters = sheet.get("offload_param") in ("cpu", "nvme")
    optimizer = sheet.get("offload_optimizer") in ("cpu", "nvme")
    if optimizer != parameters:
        stays = "offload_param" if optimizer else "offload_optimizer"
        sheet.missing(stays, "FSDP offloads parameters and states together")
    for name in ("offload_param", "offload_optimizer"):
        if sheet.get(name) == "nvme":
            sheet.missing(name, "FSDP has no disk: they are on the host")
    return parameters or optimizer
