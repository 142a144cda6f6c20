"""What buying would change is what the same job plans on that machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import WORKLOAD, make_hardware, make_job
from transformers import PretrainedConfig

from tightfit.errors import DoesNotFitError
from tightfit.facts.job import Job
from tightfit.facts.machine import machine_of
from tightfit.facts.machine_words import parse_ram
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.purchases import more_cards, purchases
from tightfit.planner.search import plan_job
from tightfit.units import GIB

PLAIN = {"loss": "full", "gradient_checkpointing": False, "offload_optimizer": "none",
         "offload_param": "none", "offload_activations": False}  # fmt: skip


@pytest.fixture
def some_plan(config: PretrainedConfig) -> Plan:
    return plan_job(make_job(**PLAIN, gpu="4090"), config, WORKLOAD, make_hardware())


def asked_for(job: Job, plan: Plan) -> dict[str, Job]:
    """The jobs that are planned, by what would be bought."""
    jobs: list[Job] = []

    def note(other: Job) -> Plan:
        jobs.append(other)
        return plan

    bought = [one for one in purchases(job, plan, note) if one.speedup is not None]
    return {one.name: job for one, job in zip(bought, jobs, strict=True)}


def test_the_parts_of_one_card(some_plan: Plan) -> None:
    jobs = asked_for(make_job(gpu="rtx-4090", ram="32GiB@50GB/s"), some_plan)
    assert list(jobs) == ["a second card", "64.00 GiB more RAM"]
    assert jobs["a second card"].num_gpus == 2
    ram = parse_ram(jobs["64.00 GiB more RAM"].ram or "")
    assert (ram.total_bytes, ram.bytes_per_second) == (96 * GIB, 50e9)


def test_the_parts_of_several_machines(some_plan: Plan) -> None:
    keys: dict[str, Any] = {"nnodes": 2, "network": "25Gb", "train_batch_size": 64}
    jobs = asked_for(make_job(gpu="8xrtx-4090", ram="1TiB", **keys), some_plan)
    faster, more = jobs["a network 4 times as fast"], jobs["4 machines instead of 2"]
    assert (faster.network, more.nnodes, more.num_gpus) == ("100Gb", 4, 8)
    assert parse_ram(jobs["1.00 TiB more RAM"].ram or "").total_bytes == 2048 * GIB


def test_nothing_is_bought_that_no_machine_has(some_plan: Plan) -> None:
    keys: dict[str, Any] = {"nnodes": 2, "network": "8x800Gb", "train_batch_size": 64}
    jobs = asked_for(make_job(gpu="8xrtx-4090", ram="40TiB", **keys), some_plan)
    assert list(jobs) == ["4 machines instead of 2"]


def test_a_link_of_its_own_where_the_card_has_one(some_plan: Plan) -> None:
    bridged = asked_for(make_job(gpu="2x3090"), some_plan)["NVLink bridge"]
    machine = machine_of(bridged)
    assert machine is not None
    assert machine.has_fabric
    assert "NVLink bridge" not in asked_for(make_job(gpu="2x4090"), some_plan)
    assert "NVLink bridge" not in asked_for(bridged, some_plan)


def test_of_this_machine_ram_alone(some_plan: Plan) -> None:
    here = replace(some_plan, limits=Limits(host_bytes=10 * GIB))
    jobs = asked_for(make_job(), here)
    assert [job.host_memory_limit for job in jobs.values()] == [f"{74 * GIB}B"]


def test_what_is_said(some_plan: Plan) -> None:
    time = some_plan.step_time
    slow = replace(some_plan, step_time=replace(time, compute=time.compute + time.total))

    def again(job: Job) -> Plan:
        if job.num_gpus == 2:
            return some_plan
        raise DoesNotFitError("nothing fits: ...\n  more", 1)

    cards, ram = purchases(make_job(gpu="4090", ram="8GiB"), slow, again)
    assert cards.speedup == pytest.approx(2)
    assert str(cards) == "a second card: 2.0x (the same plan)"
    assert (ram.speedup, ram.said) == (None, "nothing fits: ...")


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_that_more_cards_cannot_divide(
    batch: int, some_plan: Plan, fail: Callable[[Job], Plan]
) -> None:
    job = make_job(gpu="4090", train_batch_size=batch, tensor_parallel_size=1, zero_stage=0,
                   pipeline_parallel_size=1)  # fmt: skip
    assert list(more_cards(job)) == []
    (bought,) = purchases(job, some_plan, fail)
    assert bought.speedup is None
    assert "train_batch_size" in bought.said


@pytest.fixture
def fail() -> Callable[[Job], Plan]:
    def never(job: Job) -> Plan:
        raise AssertionError("planned")

    return never
