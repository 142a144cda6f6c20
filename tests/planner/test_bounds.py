"""A lower bound is never above the bill, and rises with what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.facts.job import Job
from tightfit.planner.bounds import LowerBounds
from tightfit.planner.fitting import possible
from tightfit.planner.options import options_of
from tightfit.planner.pricing import Pricing
from tightfit.policies import BatchPolicy, PlacementPolicy, Tier


def test_no_bill_is_below_its_bound(pricing: Pricing, job: Callable[..., Job]) -> None:
    """With all that is known from every candidate, each is held against its own bill."""
    options = options_of(job(), precision="fp32", chunked_loss=True)
    candidates = [policies for policies in options.candidates() if possible(policies)]
    bills = {policies: pricing.bill(policies) for policies in candidates}
    assert len(bills) == 16
    for policies, bill in bills.items():
        least = pricing.least_bill(policies)
        for tier in Tier:
            assert least.peak_bytes(tier) <= bill.peak_bytes(tier)
        own = bill.peak_bytes(Tier.DEVICE) - pricing.least_states(policies).peak_bytes(Tier.DEVICE)
        seen = least.peak_bytes(Tier.DEVICE) - pricing.least_states(policies).peak_bytes(
            Tier.DEVICE
        )
        assert seen > own / 4, "the bound says too little to turn anything down"


def test_what_was_seen_of_a_large_batch_bounds_a_smaller_one(pricing: Pricing) -> None:
    fresh = Pricing(pricing.plain, pricing.config, pricing.workload, pricing.rates)
    small = replace(pricing.plain, batch=BatchPolicy(1, 2))
    fresh.counts(small)  # the plain run, of two sequences
    least = fresh.least_bill(small).peak_bytes(Tier.DEVICE)
    assert fresh.least_states(small).peak_bytes(Tier.DEVICE) < least
    assert least <= fresh.bill(small).peak_bytes(Tier.DEVICE)


def test_activations_that_leave_do_not_count(pricing: Pricing) -> None:
    away = replace(pricing.plain, placement=PlacementPolicy(activations=Tier.HOST))
    least = [pricing.least_bill(p).peak_bytes(Tier.DEVICE) for p in (away, pricing.plain)]
    assert least[0] < least[1]


def table(device: int, pinned: int) -> MemoryTable:
    kinds = {Tier.DEVICE: {Kind.LOGITS: device}, Tier.PINNED: {Kind.ACTIVATIONS: pinned}}
    return MemoryTable({Phase.BACKWARD: kinds})


def test_activations_that_left_bound_what_the_host_takes(pricing: Pricing) -> None:
    bounds = LowerBounds()
    run = pricing.counts(pricing.plain)
    away = replace(pricing.plain, placement=PlacementPolicy(activations=Tier.HOST))
    bounds.learn(away, table(100, 1000))
    smaller = replace(away, batch=BatchPolicy(1, 2))
    larger = replace(away, batch=BatchPolicy(4, 1))
    found = [bounds.table(p, run).peak_bytes(Tier.HOST) for p in (smaller, away, larger)]
    assert found == [500, 1000, 1000]
    stays = replace(smaller, placement=PlacementPolicy())
    assert bounds.table(stays, run).peak_bytes(Tier.HOST) == 0
    states = bounds.states(stays, run).peak_bytes(Tier.DEVICE)
    assert bounds.table(stays, run).peak_bytes(Tier.DEVICE) == states + 50
