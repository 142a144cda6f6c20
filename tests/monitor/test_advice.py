"""What is said where ranks wait for each other too long, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.monitor.advice import CommunicationAdvice, advise, said_of
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Lighter, Limits, Plan, StepTime
from tightfit.policies import BatchPolicy, Policies, ShardingPolicy, Tier
from tightfit.units import MIB

BILL = MemoryTable({Phase.STEP: {Tier.DEVICE: {Kind.PARAMETERS: 3 * MIB}}})
NOW = Policies(sharding=ShardingPolicy(4, 3), batch=BatchPolicy(1, 4))
TIME = StepTime(1.0, 0.0, 0.0, 0.0, 0.0, communication=9.0)


def plan_with(
    after: Policies | None, policies: Policies = NOW, sent: float = 0.5, beside: float = 0.0
) -> Plan:
    plan = Plan(
        policies=policies, bill=BILL, plain=BILL, step_time=TIME, limits=Limits(),
        trainable_parameters=1, frozen_parameters=0, reasons=(), alternatives=(),
    )  # fmt: skip
    if after is None:
        return plan
    time = replace(TIME, optimizer=beside, communication=3.0)
    return replace(plan, lighter=Lighter(replace(plan, policies=after, step_time=time), sent))


def communication_advice(plan: Plan, records: list[StepRecord], **adapts: bool) -> str | None:
    advice = advise(plan, records)
    return None if advice is None else said_of(advice, plan, **adapts)


def steps(*waited: float) -> list[StepRecord]:
    """Steps of two seconds, of which so many were waited."""
    return [
        StepRecord(
            step=number, epoch=0.0, loss=1.0, learning_rate=1.0, grad_norm=1.0, tokens=1,
            seconds=2.0, device_bytes=None, device_peak_bytes=None, communication_seconds=seconds,
        )
        for number, seconds in enumerate(waited, 1)
    ]  # fmt: skip


STAGE_2 = replace(NOW, sharding=ShardingPolicy(4, 2))
CHANGES: dict[str, tuple[Policies, str]] = {
    "stage": (STAGE_2, "zero_stage: 2 instead of 3"),
    "replicas": (
        replace(NOW, sharding=ShardingPolicy(4, 3, replicas=2)),
        "data_parallel_replicas: 2, one on each machine",
    ),
    "batch": (
        replace(NOW, batch=BatchPolicy(2, 2)),
        "per_device_train_batch_size: 2 instead of 1, the same global batch",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_fits_is_named_with_its_seconds_and_its_bytes(name: str) -> None:
    """One second of two is waited, and half of that goes."""
    after, words = CHANGES[name]
    said = communication_advice(plan_with(after), steps(*[1.0] * 5))
    assert said == (
        "ranks wait for each other 50% of a step (median of 5). Predicted to help most: "
        f"{words}: 1.5 s per step instead of 2.0 s; it fits, device peak 3.0 MiB"
    )


def test_what_costs_more_than_it_saves_is_not_named() -> None:
    """Whole optimizer states on each rank may take longer than was waited."""
    said = communication_advice(plan_with(STAGE_2, beside=0.6), steps(1.0))
    assert said is not None
    assert "zero_stage" not in said
    assert "1.9 s" in str(communication_advice(plan_with(STAGE_2, beside=0.4), steps(1.0)))


@pytest.mark.parametrize(
    ("sharding", "key"),
    [
        (ShardingPolicy(4, 3), "per_device_train_batch_size"),
        (ShardingPolicy(4, 2), "per_device_train_batch_size"),
        (ShardingPolicy(4, 1), "gradient_accumulation_steps"),
        (ShardingPolicy(4, 0), "gradient_accumulation_steps"),
        (ShardingPolicy(4, 0, tensor_parallel=4), "tensor_parallel_size"),
    ],
)
def test_where_nothing_is_known_an_option_is_named(sharding: ShardingPolicy, key: str) -> None:
    said = communication_advice(plan_with(None, replace(NOW, sharding=sharding)), steps(1.0))
    assert said is not None
    assert key in said
    assert "Predicted" not in said


@pytest.mark.parametrize(
    ("waited", "spoken"),
    [((0.6, 0.6, 0.6), False), ((0.61, 0.61, 0.0), True), ((2.0, 0.1, 0.1), False)],
)
def test_the_median_counts_and_thirty_percent_is_allowed(
    waited: tuple[float, ...], spoken: bool
) -> None:
    assert (communication_advice(plan_with(STAGE_2), steps(*waited)) is not None) == spoken


def said_by(waited: list[float]) -> list[Any]:
    said: list[str] = []
    advice = CommunicationAdvice(plan_with(STAGE_2), said.append)
    for record in steps(*waited):
        advice.step(record)
        advice.evaluation(EvaluationRecord(record.step, 1.0, 1.0))
    return said


@pytest.mark.parametrize(
    ("waited", "times"),
    [([1.0] * 4, 0), ([1.0] * 5, 1), ([1.0] * 50, 1), ([0.1] * 20 + [1.0] * 2, 0),
     ([0.1] * 20 + [1.0] * 3, 1), ([1.0] * 2 + [0.1] * 20, 0)],
)  # fmt: skip
def test_it_is_said_once_and_of_the_last_five_steps(waited: list[float], times: int) -> None:
    assert len(said_by(waited)) == times


def test_a_run_that_adapts_says_who_changes_it() -> None:
    plan = plan_with(STAGE_2)
    busy = steps(*[1.0] * 5)
    assert str(communication_advice(plan, busy, adapts=True)).endswith(
        "The run goes on with it from the next checkpoint if that pays off by its end"
    )
    assert plan.lighter is not None
    given = replace(plan, lighter=replace(plan.lighter, given=("zero_stage",)))
    assert str(communication_advice(given, busy, adapts=True)).endswith(
        "The job gives zero_stage, so adapt leaves that to you"
    )


@pytest.mark.parametrize(("failure", "times"), [(None, 2), ("out of memory", 1)])
def test_of_each_plan_it_is_said_once(failure: str | None, times: int) -> None:
    said: list[str] = []
    before = plan_with(STAGE_2)
    advice = CommunicationAdvice(before, said.append, adapts=True)
    for record in steps(*[1.0] * 5):
        advice.step(record)
    advice.changed(PlanChange(5, before, plan_with(None, STAGE_2), 0.5, 2.0, 1.5, failure))
    for record in steps(*[1.0] * 4):
        advice.step(record)
    assert len(said) == 1, "its own five steps count"
    for record in steps(*[1.0] * 5):
        advice.step(record)
    assert len(said) == times
