"""What a dry run has besides a step: loading, resuming, cards, many micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tests.taken import every, only
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig

import tightfit.dry_run.run as program
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun, dry_run, stages
from tightfit.dry_run.depth import with_depth
from tightfit.facts.workload import Workload
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PipelineSchedule,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=None,
)  # fmt: skip
WORKLOAD = Workload(16, 1)
CARD = (8, 0)
EMBEDDING = 96 * 32 * 4


def run(card: tuple[int, int] | None = None, **policies: Any) -> DryRun:
    return dry_run(CONFIG, Policies(**policies), WORKLOAD, card=card)


def kinds(table: MemoryTable, phase: Phase, tier: Tier = Tier.DEVICE) -> dict[Kind, int]:
    return dict(table.peaks[phase].get(tier, {}))


def test_weights_pass_through_the_host_one_by_one() -> None:
    for card in (None, CARD):
        host = kinds(run(card).table, Phase.LOAD, Tier.HOST)
        assert host == {Kind.TRANSFER: EMBEDDING}


def test_a_rank_reads_its_shards_and_nothing_whole() -> None:
    found = run(sharding=ShardingPolicy(4, 3))
    load = kinds(found.table, Phase.LOAD)
    assert load.keys() == {Kind.PARAMETERS, Kind.BUFFERS}
    assert found.trainable <= load[Kind.PARAMETERS] < found.trainable * 1.02, "4 bytes, 4 ranks"
    assert kinds(found.table, Phase.LOAD, Tier.HOST) == {Kind.TRANSFER: EMBEDDING // 4}


def test_states_and_adapters_are_read_one_by_one() -> None:
    host = kinds(run().table, Phase.RESUME, Tier.HOST)
    assert host == {Kind.BUFFERS: EMBEDDING}
    lora = run(adapter=AdapterPolicy(rank=2))
    assert kinds(lora.table, Phase.RESUME, Tier.HOST) == {Kind.BUFFERS: 4 * 2 * 48}


AWAY = PlacementPolicy(Tier.HOST, Tier.HOST, Tier.HOST)


@pytest.mark.parametrize(
    ("placement", "largest"),
    [
        (PlacementPolicy(), EMBEDDING),
        (PlacementPolicy(Tier.HOST, Tier.HOST), EMBEDDING),
        (replace(AWAY, parameter_fraction=0.5), EMBEDDING),
        (AWAY, 0),
    ],
)
def test_files_of_a_card_pass_through_the_host_one_tensor_at_a_time(
    placement: PlacementPolicy, largest: int
) -> None:
    assert Kind.BUFFERS not in kinds(run(placement=placement).table, Phase.SAVE, Tier.HOST)
    found = run(CARD, placement=placement)
    assert kinds(found.table, Phase.SAVE, Tier.HOST).get(Kind.BUFFERS, 0) == largest


@pytest.mark.parametrize("card", [None, CARD])
def test_states_on_a_disk_are_read_one_parameter_at_a_time(card: tuple[int, int] | None) -> None:
    found = run(card, placement=PlacementPolicy(Tier.HOST, Tier.NVME, Tier.HOST))
    read = kinds(found.table, Phase.SAVE, Tier.HOST)[Kind.BUFFERS]
    assert read == 2 * EMBEDDING + 4, "both moments and the counter"


def test_parameters_on_a_disk_are_read_for_the_file_one_by_one() -> None:
    found = run(placement=PlacementPolicy(Tier.NVME, Tier.NVME, Tier.NVME))
    host = kinds(found.table, Phase.SAVE, Tier.HOST)
    assert EMBEDDING <= host[Kind.BUFFERS] + host.get(Kind.PARAMETERS, 0) <= 2 * EMBEDDING + 4


def test_only_a_card_has_an_allocator() -> None:
    assert Kind.ALLOCATOR not in kinds(run().table, Phase.STEP)
    table = run(CARD).table
    waste = {kinds(table, phase)[Kind.ALLOCATOR] for phase in table.peaks}
    assert len(waste) == 1
    assert waste.pop() > 0


@pytest.mark.parametrize(
    "sharding", every(2, [ShardingPolicy(), ShardingPolicy(2, 1), ShardingPolicy(2, 3)])
)
def test_two_micro_batches_stand_for_any_number(sharding: ShardingPolicy) -> None:
    two, seven = (run(batch=BatchPolicy(1, n), sharding=sharding).table for n in (2, 7))
    assert two == seven
    one = run(sharding=sharding).table
    assert one.peak_bytes(Tier.DEVICE) <= two.peak_bytes(Tier.DEVICE)


@pytest.mark.parametrize("stage", only([3], [1, 2, 3]))
def test_sharded_layers_are_extrapolated_as_they_are_gathered(stage: int) -> None:
    deep = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 9})
    policies = Policies(
        sharding=ShardingPolicy(4, stage),
        precision=PrecisionPolicy("bf16"),
        batch=BatchPolicy(1, 2),
    )
    few = dry_run(deep, policies, WORKLOAD)
    assert few == dry_run(deep, policies, WORKLOAD, full_depth=True)


@pytest.mark.parametrize("adapter", [None, AdapterPolicy(rank=2)])
def test_files_of_a_deep_model_are_extrapolated(adapter: AdapterPolicy | None) -> None:
    """What grows with depth and what does not are not the same moment."""
    wide = {"num_hidden_layers": 12, "vocab_size": 4096}
    deep = LlamaConfig(**{**CONFIG.to_dict(), **wide})
    placement = PlacementPolicy() if adapter else PlacementPolicy(Tier.HOST, Tier.NVME)
    policies = Policies(placement=placement, adapter=adapter)
    few, all_layers = (
        dry_run(deep, policies, WORKLOAD, full_depth=full, card=CARD).table
        for full in (False, True)
    )
    for phase in (Phase.SAVE, Phase.RESUME):
        assert kinds(few, phase, Tier.HOST) == kinds(all_layers, phase, Tier.HOST), phase


ORDERS = [
    {"pipeline_schedule": PipelineSchedule.ONE_FORWARD_ONE_BACKWARD},
    {"pipeline_schedule": PipelineSchedule.GPIPE},
    {"pipeline_schedule": PipelineSchedule.INTERLEAVED, "virtual_stages": 2},
]


@pytest.mark.parametrize(("layers", "order"), every(4, product([8, 10, 11], ORDERS)))
def test_stages_that_are_left_out_take_no_more_than_others(
    layers: int, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers})
    policies = Policies(
        batch=BatchPolicy(1, 5), sharding=ShardingPolicy(4, pipeline_parallel=4, **order)
    )
    runs = stages.layers_of_stages(config, policies.sharding)
    priced = stages._stages_that_may_be_fullest(config, runs, policies.sharding)
    assert {0, 3} < set(priced) < {0, 1, 2, 3}

    def table() -> MemoryTable:
        return program.run(config, policies, Workload(16, 5), full_depth=False, card=None).table

    few = table()
    monkeypatch.setattr(stages, "_stages_that_may_be_fullest", lambda *_: range(4))
    assert few == table()


def test_where_layers_differ_every_stage_is_priced() -> None:
    config = Gemma2Config(**{**CONFIG.to_dict(), "model_type": "gemma2", "head_dim": 8})
    sharding = ShardingPolicy(4, pipeline_parallel=4)
    runs = stages.layers_of_stages(config, sharding)
    assert stages._stages_that_may_be_fullest(config, runs, sharding) == [0, 1, 2, 3]


STAGED: list[dict[str, Any]] = [
    {"sharding": ShardingPolicy(4, 3, pipeline_parallel=2)},
    {"sharding": ShardingPolicy(4, pipeline_parallel=2, tensor_parallel=2)},
    {"checkpointing": CheckpointingPolicy(True, every=2)},
    {"checkpointing": CheckpointingPolicy(True), "loss": LossPolicy(LossKind.CHUNKED, 5)},
    {"placement": PlacementPolicy(Tier.HOST, Tier.HOST, activations=Tier.HOST)},
    {"placement": PlacementPolicy(*[Tier.HOST] * 4), "adapter": AdapterPolicy(rank=2)},
]


# Each order in one way here, in all others in the long proof.
IN_ORDER = [
    pytest.param(way, order, marks=[] if (i, j) in ((1, 1), (3, 0), (2, 2)) else pytest.mark.slow)
    for i, way in enumerate(STAGED)
    for j, order in enumerate(ORDERS)
]


@pytest.mark.parametrize(("way", "order"), IN_ORDER)
def test_stages_of_few_layers_stand_for_those_of_many(
    way: dict[str, Any], order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bytes in every phase, on every tier, of every stage."""
    layers = 33 * order.get("virtual_stages", 1)
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers})
    sharding = way.get("sharding", ShardingPolicy(2, pipeline_parallel=2))
    policies = Policies(
        **{**way, "batch": BatchPolicy(1, 3), "sharding": replace(sharding, **order)}
    )
    whole = program.run(config, policies, WORKLOAD, full_depth=True, card=None)
    depths: list[int] = []
    monkeypatch.setattr(
        stages, "with_depth", lambda its, layers: depths.append(layers) or with_depth(its, layers)
    )
    assert program.run(config, policies, WORKLOAD, full_depth=False, card=None) == whole
    assert depths
    assert max(depths) < layers


@pytest.mark.parametrize("loss", LossKind)
@pytest.mark.parametrize("base", [None, QuantisationPolicy()], ids=["16 bits", "4 bits"])
def test_stages_with_adapters_pass_the_type_of_their_base(
    base: QuantisationPolicy | None, loss: LossKind
) -> None:
    """The first parameter of the last stage is an adapter's, in fp32, where the base has 4 bits:
    what comes has its type no more than what goes."""
    policies = Policies(
        precision=PrecisionPolicy("bf16"),
        adapter=AdapterPolicy(rank=2),
        quantisation=base,
        loss=LossPolicy(loss),
        batch=BatchPolicy(1, 3),
        sharding=ShardingPolicy(2, pipeline_parallel=2),
    )
    found = program.run(CONFIG, policies, WORKLOAD, full_depth=True, card=None)
    assert sorted(found.stages) == [0, 1]


AWAY = [
    PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.37),
    PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.92, lazy_step=True),
    PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.05, activations=Tier.HOST),
    PlacementPolicy(Tier.DEVICE, Tier.HOST, optimizer_fraction=0.5),
    PlacementPolicy(*[Tier.HOST] * 3, parameter_fraction=0.6),
    PlacementPolicy(*[Tier.HOST] * 4, parameter_fraction=0.15, prefetch=0),
    PlacementPolicy(Tier.NVME, Tier.NVME, Tier.HOST, parameter_fraction=0.7),
]
EVERY_DAY = ((0, 0), (2, 2), (3, 3), (5, 1))
WAYS: list[dict[str, Any]] = [
    {},
    {"checkpointing": CheckpointingPolicy(True), "batch": BatchPolicy(1, 3)},
    {"precision": PrecisionPolicy("bf16"), "loss": LossPolicy(LossKind.CHUNKED, 5)},
    {"sharding": ShardingPolicy(2, 3), "batch": BatchPolicy(1, 2)},
]


# Four placements in one way each here, all in all in the long proof.
PLACED = [
    pytest.param(placement, way, marks=[] if (i, j) in EVERY_DAY else pytest.mark.slow)
    for i, placement in enumerate(AWAY)
    for j, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("placement", "way"), PLACED)
def test_two_runs_of_layers_are_extrapolated_each_along_its_line(
    placement: PlacementPolicy, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what a run of all layers takes, and without one."""
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 40})
    policies = Policies(placement=placement, **way)
    assert max(depths_that_stand_for_all(config, policies, monkeypatch)) <= 13


@pytest.mark.parametrize("placement", [AWAY[2], AWAY[5]])
def test_so_are_layers_that_take_turns(
    placement: PlacementPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they differ, or every second one is checkpointed."""
    of_gemma = {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4}
    turns = Gemma2Config(**{**CONFIG.to_dict(), **of_gemma, "num_hidden_layers": 41})
    alike = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 41})
    steps, eager = BatchPolicy(1, 2), AttentionPolicy(AttentionKernel.EAGER)
    every_second = CheckpointingPolicy(True, every=2)
    for config, policies in (
        (turns, Policies(placement=placement, batch=steps, attention=eager)),
        (alike, Policies(placement=placement, batch=steps, checkpointing=every_second)),
    ):
        assert max(depths_that_stand_for_all(config, policies, monkeypatch)) <= 15


def depths_that_stand_for_all(
    config: PretrainedConfig, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The depths that are run in place of the whole, of which they say the same."""
    workload = Workload(16, 6)
    program._of_few_layers.cache_clear()
    whole = program.run(config, policies, workload, full_depth=True, card=None)
    depths: list[int] = []
    monkeypatch.setattr(
        program, "with_depth", lambda its, layers: depths.append(layers) or with_depth(its, layers)
    )
    assert program.run(config, policies, workload, full_depth=False, card=None) == whole
    assert len(depths) >= 2
    return depths


def test_fractions_of_one_plan_share_their_runs_of_few_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 40})
    first, second = (
        Policies(placement=replace(AWAY[0], optimizer_fraction=fraction)) for fraction in (0.3, 0.7)
    )
    assert depths_that_stand_for_all(config, first, monkeypatch)
    monkeypatch.setattr(program, "with_depth", None)  # nothing is run any more
    run = {"full_depth": False, "card": None}
    one, other = (program.run(config, p, Workload(16, 6), **run) for p in (first, second))
    assert one.table != other.table


def test_two_runs_of_few_layers_are_run_whole() -> None:
    placement = PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.5)
    found = [
        program.run(CONFIG, Policies(placement=placement), WORKLOAD, full_depth=full, card=None)
        for full in (False, True)
    ]
    assert found[0] == found[1]
