"""A technique costs the same whether the job asks for it or the planner chooses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PretrainedConfig

from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner.options import options_of
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.policies import Policies


@pytest.mark.parametrize(
    "asked",
    [{"gradient_checkpointing": "true"}, {"offload_optimizer": "cpu"}],
    ids=["checkpointing", "host"],
)
def test_what_is_asked_for_takes_as_long_as_what_is_chosen(
    pricing: Pricing,
    config: PretrainedConfig,
    workload: Workload,
    rates: Rates,
    job: Callable[..., Job],
    asked: dict[str, str],
) -> None:
    fixed = options_of(job(**asked), precision="fp32", chunked_loss=True).plain()
    assert Pricing(fixed, config, workload, rates).step_time(fixed) == pricing.step_time(fixed)


def test_a_time_is_that_of_the_rates_that_are_known_by_now(
    config: PretrainedConfig, workload: Workload, rates: Rates, job: Callable[..., Job]
) -> None:
    """Those of a disk are measured when a plan may use it."""
    plain = options_of(job(), precision="fp32", chunked_loss=True).plain()
    pricing = Pricing(plain, config, workload, rates)
    before = pricing.step_time(plain)
    assert pricing.step_time(plain) is before
    pricing.rates = replace(rates, device_optimizer_parameters_per_second=1.0)
    assert pricing.step_time(plain).optimizer > before.optimizer
    pricing.rates = rates
    assert pricing.step_time(plain) == before


def test_what_was_run_whole_is_not_run_again_at_full_depth(
    config: PretrainedConfig, workload: Workload, rates: Rates, job: Callable[..., Job]
) -> None:
    plain = options_of(job(), precision="fp32", chunked_loss=True).plain()
    runs: list[Policies] = []
    for layers, whole in ((2, True), (9, False)):
        model = {**config.to_dict(), "num_hidden_layers": layers}
        pricing = Pricing(plain, model, workload, rates, observe=runs.append)
        few = pricing.run(plain)
        assert few.whole is whole
        assert pricing.run(plain, full_depth=True) == few
    assert len(runs) == 1 + 2
