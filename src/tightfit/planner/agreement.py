"""A plan file's policies held against the job that they are for: neither overrules the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.planner.options import Options
from tightfit.planner.plan_file import read_policies
from tightfit.planner.words import describe_policies
from tightfit.policies import Policies


def planned_policies(job: Job, options: Options) -> Policies:
    """The policies of the job's plan file, with the job's own optimizer.

    Raises:
        ConfigError: the file is wrong, or contradicts the job.
    """
    assert job.plan is not None
    policies = read_policies(Path(job.plan))
    check_agrees(policies, options, job)
    return replace(policies, optimizer=options.fixed.optimizer)


def check_agrees(policies: Policies, options: Options, job: Job) -> None:
    """See that a plan file's policies are among the choices that the job leaves open.

    Raises:
        ConfigError: a key of the job says something else.
    """
    fixed = options.fixed
    open_losses = {loss.kind for loss in options.losses}
    agreement = {
        "train_batch_size": policies.global_batch_size == job.global_batch_size,
        "per_device_train_batch_size": policies.batch in options.batches,
        "loss": policies.loss.kind in open_losses,
        "gradient_checkpointing": policies.checkpointing in options.checkpointing,
        **_placement_agreement(policies, options),
        "precision": job.precision in ("auto", policies.precision.parameters),
        "attention": policies.attention == fixed.attention,
        "num_gpus": policies.sharding.ranks == fixed.sharding.ranks,
        "zero_stage": policies.sharding.zero_stage in {s.zero_stage for s in options.shardings},
        "data_parallel_replicas": "data_parallel_replicas" not in job.model_fields_set
        or policies.sharding.replicas == fixed.sharding.replicas,
        "pipeline_parallel_size": policies.sharding.pipeline_parallel
        == fixed.sharding.pipeline_parallel,
        "pipeline_schedule": policies.sharding.pipeline_schedule
        is fixed.sharding.pipeline_schedule,
        "quantization_bit": policies.quantisation == fixed.quantisation,
        "finetuning_type": fixed.adapter is None or policies.adapter is not None,
        "missing allow: [lora]": policies.adapter is None
        or job.finetuning_type == "lora"
        or "lora" in job.allow,
        "lora_rank": policies.adapter is None
        or "lora_rank" not in job.model_fields_set
        or policies.adapter.rank == job.lora_rank,
    }
    contradicted = [
        f"{key}: {getattr(job, key)}" if key in Job.model_fields else key
        for key, agrees in agreement.items()
        if not agrees
    ]
    if contradicted:
        raise ConfigError(
            f"the plan ({describe_policies(policies)}) contradicts the job's "
            f"{', '.join(contradicted)}; change the one or the other"
        )


def _placement_agreement(policies: Policies, options: Options) -> dict[str, bool]:
    falls_back = options.fixed.adapter is None and policies.adapter is not None
    choices = options.lora_placement if falls_back else options.placement
    return choices.agreement(policies.placement)
