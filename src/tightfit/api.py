"""The Python API: plan a model, make it fit, train it in a loop of your own.

Thin on purpose; the work is done where the command line does it.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tightfit.dry_run.config import load_config
from tightfit.engine.apply import fit as apply_policies
from tightfit.engine.engine import Engine
from tightfit.engine.precision import DTYPES
from tightfit.errors import ConfigError
from tightfit.facts.disk import check_is_disk
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.job_values import job_of
from tightfit.facts.model_spec import load_model_spec
from tightfit.facts.workload import Workload
from tightfit.planner.machine import usable_hardware
from tightfit.planner.plan import Plan
from tightfit.planner.search import plan_job


def plan(
    model: PreTrainedModel | str,
    *,
    workload: Workload,
    hardware: Hardware | None = None,
    **keys: Any,
) -> Plan:
    """The fastest plan that fits.

    Args:
        model: a causal language model of transformers, a folder, or a catalogue or Hub name.
        workload: the shape of one step, and of evaluation if there is one.
        hardware: the machine; this one when None.
        keys: any key of a job (docs/config.md), such as `memory_limit="8GiB"`,
            `allow=["lora"]` or `gradient_checkpointing="true"`.

    Raises:
        DoesNotFitError: nothing fits; the message says by how much and what would.
        ConfigError: a key is unknown or wrong.
    """
    if isinstance(model, str):
        name, config = model, load_config(load_model_spec(model).config)
    else:
        name, config = model.config.name_or_path or type(model).__name__, model.config
        keys.setdefault("precision", _precision_of(model))
    job = _job({"model_name_or_path": name, "train_batch_size": workload.global_batch_size} | keys)
    if job.global_batch_size != workload.global_batch_size:
        raise ConfigError(
            f"train_batch_size {job.global_batch_size} contradicts the workload's "
            f"global_batch_size {workload.global_batch_size}; give one"
        )
    return plan_job(job, config, workload, hardware or usable_hardware(Path()))


def _job(keys: dict[str, Any]) -> Job:
    """The job of these keys.

    Raises:
        ConfigError: one is unknown or its value is wrong; says which.
    """
    for key in keys:
        if key not in Job.model_fields:
            near = difflib.get_close_matches(key, Job.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/config.md lists them"
            raise ConfigError(f"{key} is not a key of a job; {hint}")
    return job_of(keys, {key: key for key in keys})


def fit(
    model: PreTrainedModel,
    plan: Plan,
    *,
    device: torch.device | str | None = None,
    offload_folder: Path | str | None = None,
) -> Engine:
    """Make `model` train as `plan` says; use `engine.model` afterwards.

    Args:
        model: in the plan's precision; it is changed in place.
        device: where it computes; where it is, when None. A model whose parameters the plan places
            on host or NVMe need not fit there: leave it on the CPU.
        offload_folder: on a fast disk, for a plan that places something on NVMe; the one that was
            planned for when None.

    Raises:
        ConfigError: the model's parameters have another type than the plan is for, or the folder is
            not on a disk.
        UnsupportedError: the model cannot do what the plan asks.
    """
    precision = _precision_of(model)
    if precision != plan.policies.precision.parameters:
        raise ConfigError(
            f"the plan is for {plan.policies.precision.parameters} parameters, the model has "
            f"{precision}; load it with dtype={DTYPES[plan.policies.precision.parameters]}"
        )
    folder = plan.offload_folder if offload_folder is None else Path(offload_folder)
    if folder is not None:
        check_is_disk(folder)
    return apply_policies(
        model,
        plan.policies,
        device=None if device is None else torch.device(device),
        offload_folder=folder,
    )


def _precision_of(model: PreTrainedModel) -> str:
    for name, dtype in DTYPES.items():
        if model.dtype is dtype:
            return name
    raise ConfigError(
        f"the model's parameters are {model.dtype}; tightfit trains {' or '.join(DTYPES)}"
    )
