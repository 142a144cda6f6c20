"""Stages of a pipeline get the layers with which they fit, and no bound says that none would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.conftest import make_hardware, make_job, make_rates
from transformers import LlamaConfig

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun, Shape
from tightfit.facts.workload import Workload
from tightfit.planner.first_fit import FirstFit
from tightfit.planner.fitting import Fitting
from tightfit.planner.options import options_of
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.plan_file import read_policies, write_plan
from tightfit.planner.pricing import Pricing
from tightfit.planner.search import plan_job
from tightfit.planner.stage_cuts import layers_that_fit
from tightfit.planner.words import describe_policies
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    PipelineSchedule,
    Policies,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

WORKLOAD = Workload(sequence_length=128, global_batch_size=8)
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=12,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
# Nothing but the cut is open.
KEYS: dict[str, Any] = {
    "num_gpus": 4, "pipeline_parallel_size": 4, "train_batch_size": 8,
    "per_device_train_batch_size": 1, "gradient_checkpointing": False, "loss": "full",
    "offload_optimizer": "none", "offload_param": "none", "offload_activations": False,
    "host_memory_limit": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def bills() -> tuple[int, int]:
    """What the fullest stage takes by parameters, and with a layer less on the first."""
    options = options_of(make_job(**KEYS), precision="fp32", chunked_loss=True)
    pricing = Pricing(options.plain(), CONFIG, WORKLOAD, make_rates())
    found = []
    for layers in ((), (2, 3, 4, 3)):
        sharding = replace(options.plain().sharding, stage_layers=layers)
        bill = pricing.bill(replace(options.plain(), sharding=sharding), full_depth=True)
        found.append(bill.peak_bytes(Tier.DEVICE))
    return found[0], found[1]


def plan(**keys: Any) -> Plan:
    job = make_job(**KEYS | keys)
    return plan_job(job, CONFIG, WORKLOAD, make_hardware(), make_rates())


def test_a_pipeline_fits_by_the_bill_that_does_not_by_parameters(
    bills: tuple[int, int], tmp_path: Path
) -> None:
    by_parameters, least = bills
    chosen = plan(memory_limit=by_parameters - 1)
    assert chosen.policies.sharding.stage_layers == (2, 3, 4, 3)
    assert chosen.bill.peak_bytes(Tier.DEVICE) == least < 0.8 * by_parameters
    turned_down = [candidate.policies.sharding.stage_layers for candidate in chosen.alternatives]
    assert turned_down == [()]
    (reason,) = (reason for reason in chosen.reasons if reason.startswith("layers"))
    assert reason.startswith("layers 2, 3, 4, 3 on stages that keep 4, 3, 2, 1 micro-batches: ")
    assert "would be missing" in reason
    assert "pipeline of 4 stages (layers 2, 3, 4, 3)" in describe_policies(chosen.policies)
    written = tmp_path / "plan.yaml"
    write_plan(chosen, written)
    assert read_policies(written, chosen.policies.optimizer) == chosen.policies
    assert plan(plan=str(written), memory_limit=by_parameters - 1).bill == chosen.bill


def test_what_fits_by_parameters_stays_as_even(bills: tuple[int, int]) -> None:
    assert plan(memory_limit=bills[0]).policies.sharding.stage_layers == ()


def test_layers_that_are_given_stay(bills: tuple[int, int]) -> None:
    options = options_of(
        make_job(**KEYS, pipeline_layers=[3, 3, 3, 3]), precision="fp32", chunked_loss=True
    )
    pricing = Pricing(options.plain(), CONFIG, WORKLOAD, make_rates())
    fitting = Fitting(pricing, Limits(device_bytes=bills[0] - 1))
    assert FirstFit(options, fitting).of(options.candidates()) is None
    assert [one.policies for one in fitting.turned_down] == list(options.candidates())
    chosen = plan(memory_limit=bills[0], pipeline_layers=[2, 3, 4, 3])
    assert chosen.policies.sharding.stage_layers == (2, 3, 4, 3)


# What a stage takes, from tables that are made up.

STAGES = Policies(batch=BatchPolicy(1, 8), sharding=ShardingPolicy(4, pipeline_parallel=4))


def run_of(layers: tuple[int, ...], stages: Mapping[int, Mapping[Kind, int]]) -> DryRun:
    """Stages of these kinds on the device; a layer has a parameter, there is next to no end."""
    tables = {
        number: MemoryTable({Phase.FORWARD: {Tier.DEVICE: dict(kinds)}})
        for number, kinds in stages.items()
    }
    shape = Shape(sum(layers), 1, 1, 1, tied=True, alike=True)
    count = 1000 * sum(layers) + 1
    return DryRun(MemoryTable({}), count, 0, 0, shape, stages=tables, stage_layers=layers)


ACTIVATIONS = {
    number: {Kind.ACTIVATIONS: 8 * 10 * times} for number, times in enumerate((4, 3, 2, 1))
}


@pytest.mark.parametrize(
    ("room", "layers"),
    [
        (320, (8, 8, 8, 8)),
        (319, (7, 8, 9, 8)),  # no more moves than must
        (280, (7, 8, 9, 8)),
        (200, (5, 6, 10, 11)),
        (0, (4, 5, 8, 15)),  # none has room: the fullest is least full
    ],
)
def test_no_more_layers_move_than_must(room: int, layers: tuple[int, ...]) -> None:
    assert layers_that_fit(STAGES, run_of((8, 8, 8, 8), ACTIVATIONS), room) == layers


def test_a_stage_that_was_not_run_is_like_one_before_it() -> None:
    seen = {number: kinds for number, kinds in ACTIVATIONS.items() if number != 2}
    expected = layers_that_fit(STAGES, run_of((8, 8, 8, 8), ACTIVATIONS), 200)
    assert layers_that_fit(STAGES, run_of((8, 8, 8, 8), seen), 200) == expected


def test_what_does_not_go_with_layers_stays() -> None:
    """The loss of the last stage, which layers cannot make smaller."""
    kinds = {n: {Kind.PARAMETERS: 80} for n in range(4)}
    kinds[3] = kinds[3] | {Kind.LOGITS: 50}
    assert layers_that_fit(STAGES, run_of((8, 8, 8, 8), kinds), 100) == (9, 9, 9, 5)


def test_runs_of_interleaved_stages_share_them() -> None:
    order = (PipelineSchedule.INTERLEAVED, 2)
    policies = replace(STAGES, sharding=ShardingPolicy(2, 0, 1, 2, 1, *order))
    run = run_of((2, 2, 2, 2), {0: {Kind.ACTIVATIONS: 100}, 1: {Kind.ACTIVATIONS: 60}})
    assert layers_that_fit(policies, run, 80) == (1, 2, 2, 3)


# Bounds

WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"adapter": AdapterPolicy()},
    "qlora": {"adapter": AdapterPolicy(), "quantisation": QuantisationPolicy()},
    "zero": {"sharding": ShardingPolicy(4, 2, pipeline_parallel=2)},
}


@pytest.mark.parametrize(
    "way", ["all", "lora", "zero", pytest.param("qlora", marks=pytest.mark.slow)]
)
def test_no_cut_is_below_its_bound_nor_below_that_of_any(way: str) -> None:
    """By what was seen of every one of them, also of another micro-batch."""
    small = {"num_hidden_layers": 5, "vocab_size": 1024}
    config = LlamaConfig(**{**CONFIG.to_dict(), **small})
    plain = Policies(
        **{"sharding": ShardingPolicy(2, pipeline_parallel=2), "batch": BatchPolicy(1, 4)}
        | WAYS[way]
    )
    pricing = Pricing(plain, config, Workload(64, 4 * plain.sharding.data_parallel), make_rates())
    cuts = [
        replace(plain, sharding=replace(plain.sharding, stage_layers=layers))
        for layers in ((), (1, 4), (2, 3), (3, 2), (4, 1))
    ]
    peaks = [pricing.bill(policies).peak_bytes(Tier.DEVICE) for policies in cuts]
    bounds = [pricing.least_bill(policies).peak_bytes(Tier.DEVICE) for policies in cuts]
    assert all(bound <= peak for bound, peak in zip(bounds, peaks, strict=True))
    assert bounds[0] <= min(peaks)
    assert max(bounds) > 0.8 * max(peaks), "the bound says too little to turn anything down"
