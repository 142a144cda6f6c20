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
from tightfit.planner import search
from tightfit.planner.lighter import candidates, changes
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
    assert lighter.plan.policies == replace(
        given.policies, sharding=replace(given.policies.sharding, zero_stage=1)
    ), "stage 0 sends as much and updates more"
    # Stage 3 gathers layers twice and scatters once in each of two micro-batches, stage 1 once in
    # all; the embedding is more than half of this model, and gathered once.
    layers, root = 2 * 36_992, 2048 * 64 + 64
    assert given.trainable_parameters == layers + root
    assert lighter.sent == pytest.approx(2 * (layers + root) / (6 * layers + 4 * root), rel=1e-3)
    assert lighter.plan.bill == plan(**KEYS, zero_stage=1).bill
    assert lighter.given == ("zero_stage",)


@pytest.mark.slow
def test_what_does_not_fit_is_passed_over(plan: Callable[..., Plan]) -> None:
    bills = {stage: plan(**KEYS, zero_stage=stage).bill for stage in range(4)}
    peaks = {stage: bill.peak_bytes(Tier.DEVICE) for stage, bill in bills.items()}
    for limit in sorted(set(peaks.values())):
        if limit < peaks[3]:
            continue
        given = plan(**KEYS, zero_stage=3, memory_limit=limit)
        if given.lighter is not None:
            assert given.lighter.plan.bill.peak_bytes(Tier.DEVICE) <= limit
            assert given.lighter.sent < 1
    assert plan(**KEYS, zero_stage=3, memory_limit=peaks[3]).lighter != given.lighter


def test_what_was_looked_at_is_no_alternative(plan: Callable[..., Plan]) -> None:
    """What the planner turned down is what it looked at before it chose."""
    free = plan(**KEYS, zero_stage=3)
    tight = plan(**KEYS, zero_stage=3, memory_limit=free.bill.peak_bytes(Tier.DEVICE))
    assert tight.alternatives == ()


@pytest.mark.parametrize(
    "keys",
    [{"num_gpus": 1}, {"zero_stage": 1}],
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


def test_replicas_stay_and_stages_stay_busy() -> None:
    hsdp = Policies(sharding=ShardingPolicy(8, 3, replicas=2), batch=BatchPolicy(1, 2))
    assert [(p.sharding.zero_stage, p.batch) for p in candidates(hsdp, machines=2)] == [
        (1, BatchPolicy(1, 2)), (2, BatchPolicy(1, 2)), (3, BatchPolicy(2, 1)),
    ]  # fmt: skip
    stages = Policies(sharding=ShardingPolicy(16, 3, pipeline_parallel=2), batch=BatchPolicy(1, 4))
    found = list(candidates(stages, machines=4))
    assert {p.batch for p in found} == {stages.batch}, "fewer micro-batches leave stages idle"
    assert [p.sharding.replicas for p in found] == [1, 1, 1, 2], "each stage has two machines"


def test_fewer_tensor_ranks_see_more_sequences() -> None:
    policies = Policies(sharding=ShardingPolicy(8, tensor_parallel=4), batch=BatchPolicy(2, 3))
    found = list(candidates(policies, machines=1))[1:]
    assert [(p.sharding, p.batch) for p in found] == [
        (ShardingPolicy(8, 0, tensor_parallel=2), BatchPolicy(1, 3)),
        (ShardingPolicy(8, 3, tensor_parallel=2), BatchPolicy(1, 3)),
    ]
    assert all(p.global_batch_size == policies.global_batch_size for p in found)
    assert changes(policies, found[1]) == {
        "zero_stage": "zero_stage: 3 instead of 0",
        "tensor_parallel_size": "tensor_parallel_size: 2 instead of 4",
    }


def test_of_tensor_ranks_too(plan: Callable[..., Plan]) -> None:
    given = plan(**KEYS, tensor_parallel_size=2, zero_stage=0)
    assert given.lighter is not None
    assert given.lighter.plan.policies.sharding.tensor_parallel == 1
    assert given.lighter.sent < 1


TIGHT = {
    "num_gpus": 2, "train_batch_size": 16, "offload_optimizer": "none", "offload_param": "none",
    "offload_activations": "false",
}  # fmt: skip


def test_what_the_job_leaves_open_makes_it_fit(plan: Callable[..., Plan]) -> None:
    """A larger micro-batch does not fit as it is, and does when layers are computed again."""
    keys = TIGHT | {"loss": "full", "zero_stage": 3}
    policies = plan(**keys, per_device_train_batch_size=4, gradient_checkpointing="false")
    limit = policies.bill.peak_bytes(Tier.DEVICE)
    given = plan(
        **keys, per_device_train_batch_size=4, gradient_checkpointing="auto", memory_limit=limit
    )
    assert not given.policies.checkpointing.enabled
    lighter = given.lighter
    assert lighter is not None
    assert lighter.plan.policies.checkpointing.enabled
    assert lighter.plan.bill.peak_bytes(Tier.DEVICE) <= limit
    said = changes(given.policies, lighter.plan.policies)
    assert said["gradient_checkpointing"] == "gradient_checkpointing: selective"


@pytest.mark.parametrize(
    ("keys", "stage", "given"),
    [
        ({}, 1, ()),
        ({"zero_stage": "auto"}, 1, ()),
        ({"zero_stage": 3}, 3, ()),  # a larger micro-batch instead
        ({"zero_stage": 3, "gradient_accumulation_steps": 2}, 1, ("zero_stage",)),
        ({"gradient_accumulation_steps": 2}, 1, ()),
    ],
    ids=str,
)
def test_adapting_changes_what_the_job_leaves_open(
    monkeypatch: pytest.MonkeyPatch,
    config: PretrainedConfig,
    rates: Rates,
    hardware: Hardware,
    workload: Workload,
    keys: dict[str, Any],
    stage: int,
    given: tuple[str, ...],
) -> None:
    """The plan is ZeRO-3 with two micro-batches, as if the planner had found it to be fastest."""
    chosen = Policies(sharding=ShardingPolicy(2, 3), batch=BatchPolicy(1, 2))
    monkeypatch.setattr(search._Search, "best", lambda its: its.plan_of(chosen))
    others = {key: value for key, value in KEYS.items() if not key.startswith("per_device")}
    job = Job(model_name_or_path="m", adapt=True, save_strategy="epoch", **others, **keys)
    plan = plan_job(job, config, workload, hardware, rates, lighter=True)
    assert plan.lighter is not None
    assert plan.lighter.plan.policies.sharding.zero_stage == stage
    assert plan.lighter.given == given
    said = [note for note in plan.notes if note.startswith("adapt: true has no effect")]
    assert bool(said) == bool(given)
    assert all(key in note for key in given for note in said)
    sent = 1.0
    while plan.lighter is not None and not plan.lighter.given:
        assert plan.lighter.sent < 1
        sent *= plan.lighter.sent
        plan = plan.lighter.plan
        assert bool(plan.reasons)
    assert (sent < 1) == (not given)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_gpus": 1}, "one rank waits for nobody"),
        ({"zero_stage": 0, "per_device_train_batch_size": 2}, "no plan is known that sends less"),
    ],
)
def test_adapting_in_vain_is_said_before(
    plan: Callable[..., Plan], keys: dict[str, Any], said: str
) -> None:
    found = plan(**(KEYS | keys), adapt=True, save_strategy="epoch")
    assert any(said in note for note in found.notes)
    assert not plan(**(KEYS | keys)).notes
