"""The fraction that means so many layers, and what model states take under it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from tightfit.bill.model_states import model_state_bytes
from tightfit.bill.table import Kind
from tightfit.planner.fractions import (
    fraction_of,
    layer_bytes,
    least_leaving,
    leaving_layers,
    state_bytes,
    with_fraction,
)
from tightfit.planner.pricing import Pricing
from tightfit.policies import (
    Master,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

ON_HOST = PlacementPolicy(Tier.HOST, Tier.HOST)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 10, 25, 30, 64, 126])
def test_a_fraction_means_its_number_of_layers(layers: int) -> None:
    for leaving in range(1, layers + 1):
        fraction = fraction_of(leaving, layers)
        assert 0 < fraction < 1, "a fraction of 1 takes along what belongs to no layer"
        assert leaving_layers(fraction, layers) == leaving
        assert ceil(fraction * layers * (1 - 1e-12)) == ceil(fraction * layers * (1 + 1e-12))


def test_a_fraction_is_as_short_as_can_be() -> None:
    found = [fraction_of(leaving, 30) for leaving in (1, 7, 15, 29, 30)]
    assert found == [0.03, 0.23, 0.49, 0.96, 0.99]
    assert fraction_of(1, 2) == 0.4


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_all_and_nothing_are_the_closed_forms(pricing: Pricing, tier: Tier) -> None:
    run = pricing.run(pricing.plain)
    for placement in (PlacementPolicy(), PlacementPolicy(Tier.HOST, tier, tier)):
        policies = Policies(placement=placement)
        whole = model_state_bytes(run.trainable, 0, policies)
        found = state_bytes(run, policies)
        for where, kinds in whole.items():
            for kind, count in kinds.items():
                if kind is not Kind.COLLECTIVES:
                    assert found[where][kind] == count


def test_a_split_master_is_half_as_large(pricing: Pricing) -> None:
    run = pricing.run(pricing.plain)
    bf16 = Policies(precision=PrecisionPolicy("bf16"))
    split = replace(bf16, optimizer=OptimizerPolicy(master=Master.SPLIT))
    masters = [state_bytes(run, p)[Tier.DEVICE][Kind.MASTER_WEIGHTS] for p in (bf16, split)]
    assert masters == [4 * run.trainable, 2 * run.trainable]


def test_every_layer_less_leaves_less(pricing: Pricing) -> None:
    run = pricing.run(pricing.plain)
    whole = Policies(placement=ON_HOST)
    one = with_fraction(whole, "optimizer_fraction", fraction_of(1, 2))
    two = with_fraction(whole, "optimizer_fraction", fraction_of(2, 2))
    device = [sum(state_bytes(run, p)[Tier.DEVICE].values()) for p in (one, two, whole)]
    assert device[0] > device[1] > device[2]
    assert layer_bytes(run, whole, "optimizer_fraction") == device[0] - device[1]


def test_as_few_leave_as_the_limit_allows(pricing: Pricing) -> None:
    run = pricing.run(pricing.plain)
    whole = replace(pricing.plain, placement=ON_HOST)
    bill = pricing.bill(whole)
    peak = bill.peak_bytes(Tier.DEVICE)
    name = "optimizer_fraction"
    assert least_leaving(whole, name, bill, run, peak + 2**30) == 1
    assert least_leaving(whole, name, bill, run, peak) is None
    limits = range(peak, peak + 2**21, 2**15)
    found = [least_leaving(whole, name, bill, run, limit) or 3 for limit in limits]
    assert found == sorted(found, reverse=True)
    assert set(found) == {3, 2, 1}
