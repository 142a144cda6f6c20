"""Reasons for techniques that need no dry run: what they change is model states and time, and both
have closed forms.

The counterpart of `explain.py`, for how ranks divide a model, how bases and optimizer states are
kept, and when the host updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.planner.plan import Limits
from tightfit.planner.pricing import Pricing
from tightfit.policies import (
    BatchPolicy,
    Master,
    OptimizerName,
    PipelineSchedule,
    Policies,
    ShardingPolicy,
    Tier,
)
from tightfit.units import format_bytes, format_seconds

_WIDER = {
    OptimizerName.ADAMW_8BIT: OptimizerName.ADAMW,
    OptimizerName.ADAMW_COMPACT: OptimizerName.ADAMW,
    OptimizerName.LION_8BIT: OptimizerName.LION,
}

_ROUNDED = {
    Master.SPLIT: "parameters are rounded half away from zero",
    Master.SPLIT_8: "masters of matrices are rounded to 24 bits",
}


@dataclass(frozen=True)
class _Without:
    """A technique and what takes its place.

    Attributes:
        name: of the technique.
        policies: without it; None where there are none.
        instead: what they have in its place, or why there are none.
        costs: what it costs beside bytes and seconds; empty where nothing.
    """

    name: str
    policies: Policies | None
    instead: str
    costs: str = ""


def closed_reasons(policies: Policies, pricing: Pricing, limits: Limits) -> Iterator[str]:
    """One sentence for each of those techniques: what it saves here and what it costs."""
    if policies.adapter is not None and policies.quantisation is not None:
        run, bits = pricing.counts(policies), policies.quantisation.bits
        share = run.trainable / (run.trainable + run.frozen + run.quantised)
        yield f"LoRA: a base of {bits} bits is not trained itself; {share:.2%} of parameters are"
    for one in _without(policies):
        if one.policies is None:
            yield f"{one.name}: {one.instead}"
            continue
        states = _states(policies, one.policies, pricing)
        seconds = _seconds(policies, one.policies, pricing)
        costs = f", {one.costs}" if one.costs else ""
        missing = limits.missing_bytes(pricing.least_bill(one.policies))
        needed = ""
        if missing > 0:
            needed = f"; without it at least {format_bytes(missing)} would be missing"
        yield f"{one.name}, and not {one.instead}: {states}, {seconds}{costs}{needed}"


def _states(policies: Policies, without: Policies, pricing: Pricing) -> str:
    """What it saves of each tier."""
    own, other = pricing.least_states(policies), pricing.least_states(without)
    host = (Tier.HOST, Tier.PINNED)
    said = []
    for name, tiers in (("the device", (Tier.DEVICE,)), ("the host", host), ("nvme", (Tier.NVME,))):
        saved = sum(other.peak_bytes(tier) - own.peak_bytes(tier) for tier in tiers)
        if saved:
            said.append(f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} on {name}")
    return f"model states take {' and '.join(said)}" if said else "no memory"


def _seconds(policies: Policies, without: Policies, pricing: Pricing) -> str:
    cost = pricing.step_time(policies).total - pricing.step_time(without).total
    if not cost:
        return "costs no time"
    return (
        f"costs {format_seconds(cost)} per step"
        if cost > 0
        else f"takes {format_seconds(-cost)} less per step"
    )


def _without(policies: Policies) -> Iterator[_Without]:
    yield from _without_groups(policies)
    if policies.placement.lazy_step:
        at_once = replace(policies.placement, lazy_step=False)
        yield _Without(
            "lazy step", replace(policies, placement=at_once), "all updates before the next forward"
        )
    if policies.quantisation is not None:
        bits, precision = policies.quantisation.bits, policies.precision.parameters
        yield _Without(
            f"{bits}-bit base",
            replace(policies, quantisation=None),
            f"one in {precision}",
            f"its weights are rounded to {bits} bits",
        )
    optimizer = policies.optimizer
    if optimizer.name in _WIDER:
        wider = replace(optimizer, name=_WIDER[optimizer.name])
        yield _Without(
            f"{optimizer.name}",
            replace(policies, optimizer=wider),
            f"{wider.name}",
            "its moments are rounded to 8 bits",
        )
    if optimizer.split_master:
        whole = replace(optimizer, master=Master.FP32)
        yield _Without(
            "split master",
            replace(policies, optimizer=whole),
            "a master of 32 bits beside each parameter",
            _ROUNDED[optimizer.master],
        )


def _without_groups(policies: Policies) -> Iterator[_Without]:
    """Without a pipeline, without a tensor group, without replicas: what those ranks would do
    instead is share the batch, or all of the model states."""
    sharding = policies.sharding
    if sharding.pipeline_parallel > 1:
        flat = replace(
            sharding,
            pipeline_parallel=1,
            pipeline_schedule=PipelineSchedule.ONE_FORWARD_ONE_BACKWARD,
            virtual_stages=1,
            stage_layers=(),
        )
        yield _as_data_parallel(f"pipeline of {sharding.pipeline_parallel} stages", policies, flat)
    if sharding.tensor_parallel > 1:
        whole = replace(sharding, tensor_parallel=1)
        yield _as_data_parallel(f"tensor parallel {sharding.tensor_parallel}", policies, whole)
    if sharding.replicas > 1:
        yield _Without(
            f"{sharding.replicas} replicas of {sharding.shards} shards",
            replace(policies, sharding=replace(sharding, replicas=1)),
            f"{sharding.data_parallel} shards",
        )


def _as_data_parallel(name: str, policies: Policies, sharding: ShardingPolicy) -> _Without:
    """None where the batch cannot be shared among as many ranks."""
    total, rest = divmod(policies.global_batch_size, sharding.data_parallel)
    if rest:
        sequences = f"{policies.global_batch_size} sequences"
        said = f"{sequences} cannot be shared by {sharding.data_parallel} data-parallel ranks"
        return _Without(name, None, said)
    micro = policies.batch.micro_batch_size
    size = next(size for size in range(min(micro, total), 0, -1) if total % size == 0)
    without = replace(policies, sharding=sharding, batch=BatchPolicy(size, total // size))
    return _Without(name, without, f"{sharding.data_parallel} data-parallel ranks")
