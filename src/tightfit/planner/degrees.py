"""How the ranks of a job may be divided: the sizes of tensor, pipeline, shard and replicate groups.

Keys that name a size leave that one alone. Tensor groups stay inside a machine. Knows neither
memory nor time; what of it a model cannot do is its engine's to refuse, but for what its config
says at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tightfit.bill.stages import check_adds_up
from tightfit.facts.job import Job
from tightfit.facts.rank_keys import divisors
from tightfit.policies import PipelineSchedule, ShardingPolicy


def shardings_of(job: Job, config: Mapping[str, Any] | None = None) -> tuple[ShardingPolicy, ...]:
    """Every division that is open, what is plainest first: no groups, and nothing shared out.

    Args:
        config: of the model; without it all layers share no matrices and make no stages, unless
            the job says so.

    Raises:
        UnsupportedError: the job gives stages more or fewer layers than the model has.
    """
    layers = (config or {}).get("num_hidden_layers")
    if job.pipeline_layers and layers:
        check_adds_up(job.pipeline_layers, layers)
    found = [
        sharding
        for stages in _stages(job, config or {})
        for tensor in _tensor(job, config or {})
        if job.ranks % (tensor * stages) == 0
        for sharding in _shared_out(job, tensor, stages)
    ]
    # A stage that is asked for is to share something out, where there is a way.
    found = [one for one in found if not one.zero_stage or one.shards > 1] or found
    found.sort(key=_plainness)
    return tuple(filter(_divides, found)) or tuple(found)  # policies say why none goes


def leanest(shardings: tuple[ShardingPolicy, ...]) -> tuple[ShardingPolicy, ...]:
    """Of those the ones under which a rank may hold least: all share everything out, with layers
    and matrices divided as little and as much as is open."""
    most = max(sharding.zero_stage for sharding in shardings)
    fewest = min(sharding.replicas for sharding in shardings)
    tensor = {sharding.tensor_parallel for sharding in shardings}
    stages = {sharding.pipeline_parallel for sharding in shardings}
    return tuple(
        sharding
        for sharding in shardings
        if sharding.zero_stage == (most if sharding.data_parallel > 1 else sharding.zero_stage)
        and sharding.replicas == fewest
        and sharding.tensor_parallel in (min(tensor), max(tensor))
        and sharding.pipeline_parallel in (min(stages), max(stages))
    )


def _divides(sharding: ShardingPolicy) -> bool:
    """Whether its replicas are of two shards or more, where there are several."""
    data, replicas = sharding.data_parallel, sharding.replicas
    return replicas == 1 or (data % replicas == 0 and data > replicas)


def _plainness(sharding: ShardingPolicy) -> tuple[int, ...]:
    return (
        sharding.pipeline_parallel,
        sharding.tensor_parallel,
        sharding.replicas,
        sharding.zero_stage,
    )


def _tensor(job: Job, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Sizes that divide a machine's cards and the model's heads."""
    if job.tensor_parallel_size != "auto":
        return (job.tensor_parallel_size,)
    heads = config.get("num_attention_heads") or 1
    keys = config.get("num_key_value_heads") or heads
    return tuple(
        size
        for size in divisors(job.num_gpus)
        if heads % size == 0 and (keys % size == 0 or size % keys == 0)
    )


def _stages(job: Job, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of stages that divide the ranks, with a layer for each of their runs at least."""
    if job.pipeline_parallel_size != "auto":
        return (job.pipeline_parallel_size,)
    layers = config.get("num_hidden_layers") or 1
    runs = job.runs_per_stage
    return tuple(n for n in divisors(job.ranks) if n == 1 or n * runs <= layers)


def _shared_out(job: Job, tensor: int, stages: int) -> Iterator[ShardingPolicy]:
    data = job.ranks // (tensor * stages)
    cut = tuple(job.pipeline_layers)
    order = (PipelineSchedule(job.pipeline_schedule), job.runs_per_stage, cut) if stages > 1 else ()
    for replicas in _replicas(job, data, tensor):
        for stage in _zero_stages(job, data, replicas):
            yield ShardingPolicy(job.ranks, stage, tensor, stages, replicas, *order)


def _replicas(job: Job, data: int, tensor: int) -> tuple[int, ...]:
    """One, or as many that each is in a machine, or in some whole machines."""
    if job.data_parallel_replicas != "auto":
        return (job.data_parallel_replicas,)
    inside = job.num_gpus // tensor if job.num_gpus % tensor == 0 else 1
    return (
        1,
        *(n for n in divisors(data) if 1 < n < data and (data // n) % inside == 0),
    )


def _zero_stages(job: Job, data: int, replicas: int) -> tuple[int, ...]:
    """Replicas are of what is shared out; of several machines together only to share all of it."""
    if job.zero_stage != "auto":
        return (job.zero_stage,)
    if data == 1:
        return (0,)
    return (0, 1, 2, 3) if replicas == 1 else (1, 2, 3)
