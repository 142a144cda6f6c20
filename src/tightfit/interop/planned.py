"""A plan as keys of a job, every choice said: what is written for other tools."""

from __future__ import annotations

from typing import Any

from tightfit.facts.job import Job
from tightfit.policies import Policies, Tier

_PLACES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.NVME: "nvme"}


def planned_keys(job: Job, policies: Policies) -> dict[str, Any]:
    """The job's keys with the plan's choices in the place of its `auto`s."""
    placement, sharding, batch = policies.placement, policies.sharding, policies.batch
    said = job.model_dump(include=job.model_fields_set)
    said.pop("plan", None)
    keys: dict[str, Any] = {
        "train_batch_size": policies.global_batch_size,
        "per_device_train_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "precision": policies.precision.parameters,
        "gradient_checkpointing": _checkpointing(policies),
        "attention": str(policies.attention.kernel),
        "loss": str(policies.loss.kind),
        "offload_optimizer": _PLACES[placement.optimizer_states],
        "offload_param": _PLACES[placement.parameters],
        "offload_activations": str(placement.activations is not Tier.DEVICE).lower(),
        "lazy_step": str(placement.lazy_step).lower(),
        "zero_stage": sharding.zero_stage,
        "data_parallel_replicas": sharding.replicas,
        "tensor_parallel_size": sharding.tensor_parallel,
        "pipeline_parallel_size": sharding.pipeline_parallel,
        "optim": str(policies.optimizer.name),
        "num_gpus": job.num_gpus,
        "nnodes": job.nnodes,
        "finetuning_type": "full" if policies.adapter is None else "lora",
    }
    if placement.optimizer_states is not Tier.DEVICE:
        keys["offload_optimizer_fraction"] = placement.optimizer_fraction
    if placement.parameters is not Tier.DEVICE:
        keys["offload_param_fraction"] = placement.parameter_fraction
    if sharding.stage_layers:
        keys["pipeline_layers"] = list(sharding.stage_layers)
    if policies.adapter is not None:
        keys["lora_rank"] = policies.adapter.rank
        keys["lora_alpha"] = policies.adapter.alpha
        keys["use_rslora"] = policies.adapter.rslora
        keys["use_dora"] = policies.adapter.dora
        if policies.adapter.modules_to_save:
            keys["additional_target"] = ",".join(policies.adapter.modules_to_save)
    return {**said, **keys}


def _checkpointing(policies: Policies) -> str:
    if not policies.checkpointing.enabled:
        return "false"
    return "true" if policies.checkpointing.every == 1 else "selective"
