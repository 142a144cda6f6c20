"""The plan that sends less and fits, for when ranks turn out to wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import PretrainedConfig

from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import sent_bytes
from tightfit.planner.lighter import candidates, slowest_bytes
from tightfit.planner.plan import Plan
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job
from tightfit.policies import BatchPolicy, Policies, ShardingPolicy, Tier

KEYS: dict[str, Any] = {
    "num_gpus": 2,
    "train_batch_size": 4,
    "per_device_train_batch_size": 1,
    "loss": "full",
    "gradient_checkpointing": "false",
    "offload_optimizer": "none",
    "offload_param": "none",
    "offload_activations": "false",
}


@pytest.fixture
def plan(
    config: PretrainedConfig, rates: Rates, hardware: Hardware, workload: Workload
) -> Callable[..., Plan]:
    """Plans a job of these keys as a run does."""

    def run(**keys: Any) -> Plan:
        job = Job(model_name_or_path="m", **keys)
        return plan_job(job, config, workload, hardware, rates, lighter=True)

    return run


def test_of_what_fits_it_is_what_sends_least(plan: Callable[..., Plan]) -> None:
    given = plan(**KEYS, zero_stage=3)
    lighter = given.lighter
    assert lighter is not None
    assert lighter.policies == replace(
        given.policies, sharding=replace(given.policies.sharding, zero_stage=1)
    ), "stage 0 sends as much and updates more"
    # Stage 3 gathers twice and scatters once in each of two micro-batches, stage 1 once in all.
    assert lighter.sent == pytest.approx(2 / 6)
    assert lighter.bill == plan(**KEYS, zero_stage=1).bill


def test_what_does_not_fit_is_passed_over(plan: Callable[..., Plan]) -> None:
    bills = {stage: plan(**KEYS, zero_stage=stage).bill for stage in range(4)}
    peaks = {stage: bill.peak_bytes(Tier.DEVICE) for stage, bill in bills.items()}
    for limit in sorted(set(peaks.values())):
        if limit < peaks[3]:
            continue
        given = plan(**KEYS, zero_stage=3, memory_limit=limit)
        if given.lighter is not None:
            assert given.lighter.bill.peak_bytes(Tier.DEVICE) <= limit
            assert given.lighter.sent < 1
    assert plan(**KEYS, zero_stage=3, memory_limit=peaks[3]).lighter != given.lighter


def test_what_was_looked_at_is_no_alternative(plan: Callable[..., Plan]) -> None:
    """What the planner turned down is what it looked at before it chose."""
    free = plan(**KEYS, zero_stage=3)
    tight = plan(**KEYS, zero_stage=3, memory_limit=free.bill.peak_bytes(Tier.DEVICE))
    assert tight.alternatives == ()


@pytest.mark.parametrize(
    "keys",
    [{"num_gpus": 1}, {"num_gpus": 2, "tensor_parallel_size": 2}, {"zero_stage": 1}],
    ids=str,
)
def test_there_is_none(plan: Callable[..., Plan], keys: dict[str, Any]) -> None:
    assert plan(**(KEYS | {"train_batch_size": 2} | keys)).lighter is None


def test_what_is_looked_at() -> None:
    policies = Policies(sharding=ShardingPolicy(8, 3), batch=BatchPolicy(2, 6))
    found = list(candidates(policies, machines=2))
    assert [(p.sharding.zero_stage, p.sharding.replicas, p.batch) for p in found] == [
        (0, 1, BatchPolicy(2, 6)),
        (1, 1, BatchPolicy(2, 6)),
        (2, 1, BatchPolicy(2, 6)),
        (3, 1, BatchPolicy(4, 3)),
        (3, 1, BatchPolicy(6, 2)),
        (3, 1, BatchPolicy(12, 1)),
        (3, 2, BatchPolicy(2, 6)),
    ]
    assert all(p.global_batch_size == policies.global_batch_size for p in found)
    assert list(candidates(Policies(), machines=1)) == []


def test_replicas_send_sums_of_shards_between_machines() -> None:
    """Two machines of four ranks: each rank sends its quarter of the gradients once, in fp32."""
    policies = Policies(sharding=ShardingPolicy(8, 3, replicas=2), batch=BatchPolicy(1, 3))
    assert slowest_bytes(1000, 400, policies) == pytest.approx(3 * 4 * 400 / 4)
    whole = replace(policies, sharding=ShardingPolicy(8, 3))
    assert slowest_bytes(1000, 400, whole) == sent_bytes(1000, 400, whole)
