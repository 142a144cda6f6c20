"""Which placements a job's keys leave open, in which order, and which fraction is the planner's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tightfit.facts.job import Job
from tightfit.planner.placements import (
    PlacementChoices,
    placement_choices,
    uses_disk,
    without_placement,
)
from tightfit.planner.words import count_techniques, describe_policies
from tightfit.policies import (
    AdapterPolicy,
    Master,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

MakeJob = Callable[..., Job]
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def choices(job: Job, *, on_card: bool = False) -> PlacementChoices:
    full = job.finetuning_type == "full"
    together = job.optim_master == "split"
    return placement_choices(job, on_card=on_card, trains_parameters=full, together=together)


def tiers(job: Job) -> list[tuple[Tier, Tier, Tier]]:
    """Gradients, states and parameters of each placement with activations on the device."""
    found = choices(job).all
    near = [p for p in found if p.activations is DEVICE]
    return [(p.gradients, p.optimizer_states, p.parameters) for p in near]


def test_what_may_leave_under_auto_nearest_first(job: MakeJob) -> None:
    assert tiers(job()) == [
        (DEVICE, DEVICE, DEVICE),
        (HOST, HOST, DEVICE),
        (HOST, NVME, DEVICE),
        (HOST, HOST, HOST),
        (HOST, NVME, HOST),
        (HOST, HOST, NVME),
        (HOST, NVME, NVME),
        (NVME, NVME, NVME),
    ]
    every = choices(job()).all
    assert len(every) == len(set(every)) == 16
    assert [p.activations for p in every] == [DEVICE] * 8 + [HOST] * 8


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"offload_optimizer": "none"}, [(DEVICE, DEVICE, DEVICE)]),
        ({"offload_optimizer": "cpu"},
         [(HOST, HOST, DEVICE), (HOST, HOST, HOST), (HOST, HOST, NVME)]),
        ({"offload_optimizer": "cpu", "offload_param": "none"}, [(HOST, HOST, DEVICE)]),
        ({"offload_param": "cpu"}, [(HOST, HOST, HOST), (HOST, NVME, HOST)]),
        ({"offload_param": "nvme", "offload_optimizer": "cpu"}, [(HOST, HOST, NVME)]),
        ({"offload_param": "nvme"},
         [(HOST, HOST, NVME), (HOST, NVME, NVME), (NVME, NVME, NVME)]),
        ({"offload_param": "none", "offload_optimizer_fraction": 0.5},
         [(DEVICE, DEVICE, DEVICE), (HOST, HOST, DEVICE), (HOST, NVME, DEVICE)]),
        ({"offload_optimizer_fraction": 0.5, "offload_optimizer": "cpu"},
         [(HOST, HOST, DEVICE)]),
        ({"finetuning_type": "lora", "offload_param": "cpu"},
         [(DEVICE, DEVICE, HOST), (HOST, HOST, HOST)]),
        ({"optim_master": "split", "offload_optimizer": "cpu"},
         [(HOST, HOST, HOST), (HOST, HOST, NVME)]),
    ],
)  # fmt: skip
def test_what_may_leave_under_keys(
    job: MakeJob, keys: dict[str, Any], expected: list[tuple[Tier, Tier, Tier]]
) -> None:
    assert tiers(job(**keys)) == expected


def test_all_placements_are_policies(job: MakeJob) -> None:
    for placement in choices(job()).all:
        Policies(placement=placement)
    for placement in choices(job(finetuning_type="lora")).all:
        Policies(placement=placement, adapter=AdapterPolicy())


def test_activations_that_are_named(job: MakeJob) -> None:
    def named(word: bool) -> set[Tier]:
        return {p.activations for p in choices(job(offload_activations=word)).all}

    assert named(True) == {HOST}
    assert named(False) == {DEVICE}


@pytest.mark.parametrize(
    ("lazy_step", "on_card", "expected"),
    [
        ("auto", False, {DEVICE: False, HOST: False, NVME: True}),
        ("auto", True, {DEVICE: False, HOST: True, NVME: True}),
        ("true", False, {DEVICE: False, HOST: True, NVME: True}),
        ("false", True, {DEVICE: False, HOST: False, NVME: False}),
    ],
)
def test_the_lazy_step_is_on_by_itself_where_it_gains(
    job: MakeJob, lazy_step: str, on_card: bool, expected: dict[Tier, bool]
) -> None:
    found = choices(job(lazy_step=lazy_step), on_card=on_card).all
    assert {p.optimizer_states: p.lazy_step for p in found} == expected


@pytest.mark.parametrize(
    ("keys", "placement", "name"),
    [
        ({}, PlacementPolicy(), None),
        ({}, PlacementPolicy(HOST, HOST), "optimizer_fraction"),
        ({}, PlacementPolicy(HOST, NVME), "optimizer_fraction"),
        ({}, PlacementPolicy(HOST, HOST, HOST), "parameter_fraction"),
        ({}, PlacementPolicy(activations=HOST), None),
        ({"offload_optimizer": "cpu"}, PlacementPolicy(HOST, HOST), None),
        ({"offload_optimizer": "cpu"}, PlacementPolicy(HOST, HOST, HOST), "parameter_fraction"),
        ({"offload_optimizer_fraction": 0.5}, PlacementPolicy(HOST, HOST), None),
        ({"offload_param_fraction": 0.5}, PlacementPolicy(HOST, HOST, HOST), None),
        ({"optim_master": "split"}, PlacementPolicy(HOST, HOST, HOST), None),
    ],
)
def test_the_fraction_that_is_the_planners(
    job: MakeJob, keys: dict[str, Any], placement: PlacementPolicy, name: str | None
) -> None:
    """What is asked for leaves whole; of the rest as much as is missing."""
    assert choices(job(**keys)).open_fraction(placement) == name


def test_numbers_of_the_job_are_in_every_placement_that_uses_them(job: MakeJob) -> None:
    found = choices(job(offload_prefetch=3, offload_param_fraction=0.25)).all
    assert {p.prefetch for p in found} == {3}
    assert {p.parameter_fraction for p in found if p.parameters is not DEVICE} == {0.25}
    assert {p.parameter_fraction for p in found if p.parameters is DEVICE} == {1.0}


def test_each_thing_comes_back_by_itself_where_it_can() -> None:
    away = PlacementPolicy(HOST, HOST, HOST, HOST, parameter_fraction=0.5, lazy_step=True)
    found = dict(without_placement(Policies(placement=away)))
    assert [*found] == [
        "gradients and optimizer on the host, without which parameters cannot leave",
        "50% of parameters on the host",
        "activations on the host",
    ]
    assert [count_techniques(policies) for policies in found.values()] == [1, 2, 2]
    adapted = Policies(placement=away, adapter=AdapterPolicy())
    back = dict(without_placement(adapted))["gradients and optimizer on the host"]
    assert back.placement.parameters is HOST
    assert back.placement.optimizer_states is DEVICE


@pytest.mark.parametrize("tier", [HOST, NVME])
def test_a_split_masters_parameters_do_not_come_back_alone(tier: Tier) -> None:
    split = Policies(
        placement=PlacementPolicy(HOST, tier, tier),
        precision=PrecisionPolicy("bf16"),
        optimizer=OptimizerPolicy(master=Master.SPLIT),
    )
    (back,) = dict(without_placement(split)).values()
    assert back.placement == PlacementPolicy()


def test_a_share_is_said() -> None:
    part = PlacementPolicy(HOST, NVME, optimizer_fraction=0.23, lazy_step=True)
    policies = Policies(placement=part)
    assert "23% of optimizer on NVMe + gradients on host, lazy step" in describe_policies(policies)
    name, _ = next(without_placement(policies))
    assert name == "23% of optimizer on nvme, its gradients on the host"
    assert uses_disk(part)
    assert not uses_disk(PlacementPolicy(HOST, HOST, HOST))
