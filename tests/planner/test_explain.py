"""Every number in a reason is a difference of two bills, or of a bill and a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tightfit.facts.job import Job
from tightfit.planner.explain import bottleneck, reasons_for, without_effect
from tightfit.planner.options import without_technique
from tightfit.planner.plan import Limits, Plan, StepTime
from tightfit.planner.pricing import Pricing
from tightfit.policies import PlacementPolicy, Policies, Tier
from tightfit.units import format_bytes, format_seconds

Planner = Callable[..., Plan]


def test_reasons_are_differences_of_two_bills(
    plan: Planner, peaks: list[int], pricing: Pricing
) -> None:
    chosen = plan(memory_limit=peaks[0])
    others = dict(without_technique(chosen.policies))
    for without in others.values():
        pricing.bill(without)  # what was run anyway is not bounded
    reasons = list(reasons_for(chosen.policies, pricing, chosen.limits))
    assert len(chosen.reasons) == len(reasons) == len(others) >= 3
    for reason, (name, without) in zip(reasons, others.items(), strict=True):
        bill = pricing.bill(without)
        saved = bill.peak_bytes(Tier.DEVICE) - chosen.bill.peak_bytes(Tier.DEVICE)
        seconds = chosen.step_time.total - pricing.step_time(without).total
        missing = chosen.limits.missing_bytes(bill)
        assert reason.startswith(f"{name}: {format_bytes(saved)} less on the device, ")
        assert (f"costs {format_seconds(seconds)}" in reason) is (seconds > 0)
        assert missing > 0, "in the tightest plan of all each technique is needed"
        assert reason.endswith(f"without it {format_bytes(missing)} would be missing")


def test_what_a_bound_decides_is_not_priced(
    plan: Planner, peaks: list[int], pricing: Pricing
) -> None:
    """Nothing that is said is more than what a dry run says."""
    chosen = plan(memory_limit=peaks[0])
    fresh = Pricing(pricing.plain, pricing.config, pricing.workload, pricing.rates)
    fresh.bill(fresh.plain)
    reasons = list(reasons_for(chosen.policies, fresh, chosen.limits))
    bounded = [
        (reason, without)
        for reason, without in zip(reasons, without_all(chosen.policies), strict=True)
        if ": at least " in reason
    ]
    assert bounded
    for reason, without in bounded:
        assert not fresh.was_run(without) or without == fresh.plain
        least = fresh.least_bill(without).peak_bytes(Tier.DEVICE)
        saved = least - chosen.bill.peak_bytes(Tier.DEVICE)
        assert f": at least {format_bytes(saved)} less on the device, " in reason
        missing = format_bytes(least - peaks[0])
        assert reason.endswith(f"without it at least {missing} would be missing")
        assert least <= pricing.bill(without).peak_bytes(Tier.DEVICE)


def without_all(policies: Policies) -> list[Policies]:
    """Without each technique."""
    return [without for _, without in without_technique(policies)]


def test_a_technique_that_saves_time_or_is_not_needed_says_so(pricing: Pricing) -> None:
    lean = replace(pricing.plain, placement=type(pricing.plain.placement)(Tier.HOST, Tier.HOST))
    slow = replace(pricing.rates, device_optimizer_parameters_per_second=1.0)
    reason = next(reasons_for(lean, replace(pricing, rates=slow), Limits()))
    assert "less per step; it also fits without" in reason


@pytest.mark.parametrize(
    ("keys", "placement", "named"),
    [
        ({}, PlacementPolicy(), []),
        ({"lazy_step": False, "offload_prefetch": "auto"}, PlacementPolicy(), []),
        ({"lazy_step": True}, PlacementPolicy(), ["lazy_step: true"]),
        ({"lazy_step": True}, PlacementPolicy(Tier.HOST, Tier.HOST), []),
        ({"offload_optimizer_fraction": 0.5}, PlacementPolicy(),
         ["offload_optimizer_fraction: 0.5"]),
        ({"offload_optimizer_fraction": 0.5}, PlacementPolicy(Tier.HOST, Tier.HOST), []),
        ({"offload_param_fraction": 0.5, "offload_prefetch": 0}, PlacementPolicy(),
         ["offload_param_fraction: 0.5", "offload_prefetch: 0"]),
        ({"offload_param_fraction": 0.5, "offload_prefetch": 2},
         PlacementPolicy(activations=Tier.HOST), ["offload_param_fraction: 0.5"]),
    ],
)  # fmt: skip
def test_keys_that_do_nothing_are_named(
    keys: dict[str, Any], placement: PlacementPolicy, named: list[str]
) -> None:
    job = Job(model_name_or_path="m", **keys)
    found = list(without_effect(job, Policies(placement=placement)))
    assert [line.split(" has no effect")[0] for line in found] == named


def test_a_plan_says_which_keys_did_nothing(plan: Planner) -> None:
    chosen = plan(memory_limit="1GiB", offload_optimizer_fraction=0.5, lazy_step="true")
    assert [note.split(":")[0] for note in chosen.notes] == [
        "offload_optimizer_fraction",
        "lazy_step",
    ]
    assert chosen.to_json()["notes"] == list(chosen.notes)
    assert plan(memory_limit="1GiB").notes == ()


def test_the_bottleneck_is_what_takes_most_and_what_is_fullest(plan: Planner) -> None:
    bill = plan().bill
    peak, more = bill.peak_bytes(Tier.DEVICE), bill.peak_bytes(Tier.HOST) + 10
    time = StepTime(compute=6.0, recompute=0.0, optimizer=3.0, copies=1.0, overhead=0.0)
    assert bottleneck(bill, time, Limits(device_bytes=peak + 5, host_bytes=more)) == (
        "computing takes 60% of a step, then the optimizer's update 30%; of memory device is "
        f"nearest to its limit ({format_bytes(peak)} of {format_bytes(peak + 5)})"
    )
    assert bottleneck(bill, replace(time, optimizer=0.0, copies=0.01), Limits()) == (
        "computing takes 100% of a step"
    )
    assert plan().bottleneck.startswith("computing takes")
