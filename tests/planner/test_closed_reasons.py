"""What is said of a technique without a dry run is what its closed forms say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import WORKLOAD
from transformers import PretrainedConfig

import tightfit.planner.pricing
from tightfit.planner.closed_reasons import closed_reasons
from tightfit.planner.explain import reasons_for
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    Master,
    OptimizerName,
    OptimizerPolicy,
    PipelineSchedule,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)
from tightfit.units import format_bytes, format_seconds

BF16 = Policies(precision=PrecisionPolicy("bf16"))
QLORA = replace(BF16, adapter=AdapterPolicy(rank=2), quantisation=QuantisationPolicy())
LAZY = PlacementPolicy(Tier.HOST, Tier.HOST, lazy_step=True)
FOUR = BatchPolicy(1, 4)
NO_LIMITS = Limits()


@pytest.fixture(scope="module")
def on_card(config: PretrainedConfig, rates: Rates) -> Pricing:
    """A card, whose computing hides what the host does."""
    return Pricing(BF16, config, WORKLOAD, rates, card=(8, 0))


@pytest.fixture
def said(on_card: Pricing, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The reasons; a dry run beyond those that a plan has anyway is a failure."""

    def run(policies: Policies, limits: Limits = NO_LIMITS) -> list[str]:
        on_card.step_time(policies)
        with monkeypatch.context() as patch:
            patch.setattr(tightfit.planner.pricing, "dry_run", None)
            return list(closed_reasons(policies, on_card, limits))

    return run


def with_sharding(batch: BatchPolicy = FOUR, **sizes: Any) -> Policies:
    return replace(BF16, batch=batch, sharding=ShardingPolicy(**sizes))


def with_optimizer(**choices: Any) -> Policies:
    return replace(BF16, optimizer=OptimizerPolicy(**choices))


CASES: dict[str, tuple[Policies, Policies]] = {
    "pipeline of 2 stages, and not 4 data-parallel ranks": (
        with_sharding(ranks=4, zero_stage=1, pipeline_parallel=2),
        with_sharding(BatchPolicy(1, 2), ranks=4, zero_stage=1),
    ),
    "tensor parallel 2, and not 2 data-parallel ranks": (
        with_sharding(BatchPolicy(2, 1), ranks=2, tensor_parallel=2),
        with_sharding(BatchPolicy(1, 1), ranks=2),
    ),
    "2 replicas of 2 shards, and not 4 shards": (
        with_sharding(ranks=4, zero_stage=3, replicas=2),
        with_sharding(ranks=4, zero_stage=3),
    ),
    "lazy step, and not all updates before the next forward": (
        replace(BF16, placement=LAZY),
        replace(BF16, placement=replace(LAZY, lazy_step=False)),
    ),
    "4-bit base, and not one in bf16": (QLORA, replace(QLORA, quantisation=None)),
    "adamw_8bit, and not adamw": (with_optimizer(name=OptimizerName.ADAMW_8BIT), BF16),
    "lion_8bit, and not lion": (
        with_optimizer(name=OptimizerName.LION_8BIT),
        with_optimizer(name=OptimizerName.LION),
    ),
    "split master, and not a master of 32 bits beside each parameter": (
        with_optimizer(master=Master.SPLIT),
        BF16,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_technique_says_bytes_and_seconds(
    said: Callable[..., list[str]], on_card: Pricing, name: str
) -> None:
    policies, without = CASES[name]
    (reason,) = (one for one in said(policies) if one.startswith(f"{name}: "))
    own, other = on_card.least_states(policies), on_card.least_states(without)
    saved = other.peak_bytes(Tier.DEVICE) - own.peak_bytes(Tier.DEVICE)
    if "lazy" in name:
        assert ": no memory, " in reason
    else:
        assert saved != 0
        what = "less" if saved > 0 else "more"
        assert f"model states take {format_bytes(abs(saved))} {what} on the device, " in reason
    cost = on_card.step_time(policies).total - on_card.step_time(without).total
    time = f"{format_seconds(abs(cost))} {'per step' if cost > 0 else 'less per step'}"
    assert (time if cost else "costs no time") in reason


def test_the_bytes_of_a_split_master_and_of_a_packed_base(
    said: Callable[..., list[str]], on_card: Pricing
) -> None:
    """By numbers that nobody in the planner works out: two bytes a parameter, and of a base in 4
    bits with its scales no more than 0.6 bytes of the two."""
    count = on_card.run(BF16).trainable
    (split,) = said(with_optimizer(master=Master.SPLIT))
    assert f"take {format_bytes(2 * count)} less on the device" in split
    run = on_card.counts(QLORA)
    states = [on_card.least_states(p) for p in (replace(QLORA, quantisation=None), QLORA)]
    saved = states[0].peak_bytes(Tier.DEVICE) - states[1].peak_bytes(Tier.DEVICE)
    assert 1.4 * run.quantised < saved < 1.5 * run.quantised


def test_adapters_under_a_packed_base_say_what_is_trained(
    said: Callable[..., list[str]], on_card: Pricing
) -> None:
    lora, base = said(QLORA)
    run = on_card.counts(QLORA)
    share = run.trainable / on_card.run(BF16).trainable
    assert lora.startswith("LoRA: a base of 4 bits is not trained itself; ")
    assert float(lora.split("; ")[1].split("%")[0]) / 100 == pytest.approx(share, rel=0.05)
    assert base.startswith("4-bit base")


def test_a_lazy_step_takes_less_time_on_a_card(said: Callable[..., list[str]]) -> None:
    (reason,) = said(replace(BF16, placement=LAZY))
    assert "less per step" in reason


def test_what_would_be_missing_is_said(said: Callable[..., list[str]], on_card: Pricing) -> None:
    least = on_card.least_bill(BF16).peak_bytes(Tier.DEVICE)
    split = with_optimizer(master=Master.SPLIT)
    (reason,) = said(split, Limits(device_bytes=least - 1))
    assert reason.endswith("; without it at least 1 B would be missing")
    (reason,) = said(split, Limits(device_bytes=least))
    assert "missing" not in reason


def test_a_batch_of_one_needs_its_groups(said: Callable[..., list[str]]) -> None:
    one = with_sharding(BatchPolicy(1, 1), ranks=2, tensor_parallel=2)
    assert said(one) == ["tensor parallel 2: 1 sequences cannot be shared by 2 data-parallel ranks"]


def test_a_pipeline_whose_layers_are_given_gives_way_to_a_whole_model(
    said: Callable[..., list[str]],
) -> None:
    policies = with_sharding(
        ranks=2,
        pipeline_parallel=2,
        pipeline_schedule=PipelineSchedule.GPIPE,
        stage_layers=(1, 1),
    )
    (reason,) = said(policies)
    assert reason.startswith("pipeline of 2 stages, and not 2 data-parallel ranks: ")


def test_they_are_among_the_reasons_of_a_plan(plan: Callable[..., Plan], pricing: Pricing) -> None:
    chosen = plan(optim="adamw_8bit")
    (reason,) = chosen.reasons
    assert reason.startswith("adamw_8bit, and not adamw: model states take ")
    assert [*reasons_for(chosen.policies, pricing, chosen.limits)] == [reason]
