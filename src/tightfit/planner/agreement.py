"""A plan file's policies held against the job that they are for: neither overrules the other."""

from __future__ import annotations

from pathlib import Path

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.planner.options import Options, Way
from tightfit.planner.plan_file import read_policies
from tightfit.planner.words import describe_policies
from tightfit.policies import Policies, ShardingPolicy


def planned_policies(job: Job, options: Options) -> Policies:
    """The policies of the job's plan file, with the numbers of the job's optimizer.

    Raises:
        ConfigError: the file is wrong, or contradicts the job.
    """
    assert job.plan is not None
    policies = read_policies(Path(job.plan), options.own.fixed.optimizer)
    check_agrees(policies, options, job)
    return policies


def check_agrees(policies: Policies, options: Options, job: Job) -> None:
    """See that a plan file's policies are among the choices that the job leaves open.

    Raises:
        ConfigError: a key of the job says something else.
    """
    fixed, sharding = options.own.fixed, policies.sharding
    way = _way(policies, options)
    agreement = {
        "train_batch_size": policies.global_batch_size == job.global_batch_size,
        "per_device_train_batch_size": policies.batch in options.batches(sharding),
        "loss": policies.loss.kind in {loss.kind for loss in options.losses},
        "gradient_checkpointing": policies.checkpointing in options.checkpointing,
        **way.placement.agreement(policies.placement),
        "precision": job.precision in ("auto", policies.precision.parameters),
        "attention": policies.attention == fixed.attention,
        "num_gpus": sharding.ranks == fixed.sharding.ranks,
        **_sharding_agreement(sharding, job),
        "optim": policies.optimizer.name in (fixed.optimizer.name, way.fixed.optimizer.name),
        "quantization_bit": policies.quantisation in (fixed.quantisation, way.fixed.quantisation),
        "finetuning_type": fixed.adapter is None or policies.adapter is not None,
        f"missing allow: [{', '.join(way.allow)}]": {*way.allow} <= {*job.allow},
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


def _sharding_agreement(sharding: ShardingPolicy, job: Job) -> dict[str, bool]:
    agreement = {
        key: getattr(job, key) in ("auto", value)
        for key, value in {
            "zero_stage": sharding.zero_stage,
            "data_parallel_replicas": sharding.replicas,
            "tensor_parallel_size": sharding.tensor_parallel,
            "pipeline_parallel_size": sharding.pipeline_parallel,
        }.items()
    }
    if sharding.pipeline_parallel > 1:
        agreement |= {
            "pipeline_schedule": job.pipeline_schedule == sharding.pipeline_schedule,
            "virtual_pipeline_stages": job.runs_per_stage == sharding.virtual_stages,
            "pipeline_layers": tuple(job.pipeline_layers) in ((), sharding.stage_layers),
        }
    return agreement


def _way(policies: Policies, options: Options) -> Way:
    """The way that a plan goes: its adapters may have numbers of their own."""
    ways = (options.own, *options.others)
    return next((way for way in ways if _states(way.fixed) == _states(policies)), options.own)


def _states(policies: Policies) -> tuple[object, ...]:
    optimizer = policies.optimizer
    adapted, quantised = policies.adapter is not None, policies.quantisation is not None
    return adapted, quantised, optimizer.name, optimizer.master
