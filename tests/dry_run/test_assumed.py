"""What the engine cannot do yet is priced, and said to be."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from tests.taken import every
from transformers import LlamaConfig

from tightfit.bill.model_states import tensor_state_bytes
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun, dry_run
from tightfit.dry_run.assumed import nearest, tensors_of
from tightfit.facts.workload import Workload
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
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

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=None,
)  # fmt: skip
WORKLOAD = Workload(16, 2, evaluation_sequence_length=16)


def run(**policies: Any) -> DryRun:
    return dry_run(CONFIG, Policies(**policies), WORKLOAD)


def step(table: MemoryTable, tier: Tier = Tier.DEVICE) -> Mapping[Kind, int]:
    return table.peaks[Phase.STEP].get(tier, {})


@pytest.mark.parametrize(
    "policies",
    [
        Policies(),
        Policies(adapter=AdapterPolicy(), quantisation=QuantisationPolicy()),
        Policies(placement=PlacementPolicy(Tier.HOST, Tier.HOST)),
        Policies(placement=PlacementPolicy(Tier.HOST, Tier.HOST, Tier.NVME)),
        Policies(sharding=ShardingPolicy(4, 3)),
        Policies(sharding=ShardingPolicy(8, 3, 2, replicas=2)),
        Policies(precision=PrecisionPolicy("bf16")),
    ],
)
def test_what_the_engine_can_do_is_run_as_it_is(policies: Policies) -> None:
    assert nearest(policies).policies == policies
    assert nearest(policies).notes == ()


@pytest.mark.parametrize("placement", [PlacementPolicy(), PlacementPolicy(Tier.HOST, Tier.HOST)])
def test_adafactor_has_the_states_of_its_closed_form(placement: PlacementPolicy) -> None:
    plain = run(placement=placement)
    other = run(placement=placement, optimizer=OptimizerPolicy(OptimizerName.ADAFACTOR))
    assert other.notes == ()
    closed = tensor_state_bytes(
        tensors_of(CONFIG, Policies()), Policies(optimizer=OptimizerPolicy(OptimizerName.ADAFACTOR))
    )
    for tier in (Tier.DEVICE, Tier.HOST):
        had, has = (
            step(found.table, tier).get(Kind.OPTIMIZER_STATES, 0) for found in (plain, other)
        )
        states = closed[Tier.DEVICE][Kind.OPTIMIZER_STATES]
        assert has == (states if tier is placement.optimizer_states else 0)
        assert has < had / 10 or not had


def test_eight_bits_are_twice_four() -> None:
    lora = AdapterPolicy(rank=2)
    four, eight = (run(adapter=lora, quantisation=QuantisationPolicy(bits)) for bits in (4, 8))
    assert four.quantised == eight.quantised > 0
    more = step(eight.table)[Kind.PARAMETERS] - step(four.table)[Kind.PARAMETERS]
    assert more == pytest.approx(four.quantised / 2, rel=0.15)


def test_tensor_parallel_ranks_share_the_matrices() -> None:
    one, two = run(), run(sharding=ShardingPolicy(2, tensor_parallel=2))
    assert two.trainable == one.trainable, "over all ranks"
    parameters = step(two.table)[Kind.PARAMETERS]
    assert 2 * one.trainable < parameters < 2.1 * one.trainable
    assert step(two.table)[Kind.OPTIMIZER_STATES] == pytest.approx(2 * parameters, rel=0.01)
    activations = [t.table.peaks[Phase.FORWARD][Tier.DEVICE][Kind.ACTIVATIONS] for t in (one, two)]
    assert activations[0] / 2 < activations[1] < activations[0]


def test_a_pipeline_stage_holds_its_layers_and_what_is_in_flight() -> None:
    batch = BatchPolicy(1, 2)
    whole = run(batch=batch)
    stage = run(batch=batch, sharding=ShardingPolicy(2, pipeline_parallel=2))
    ratio = step(stage.table)[Kind.PARAMETERS] / step(whole.table)[Kind.PARAMETERS]
    assert 0.5 <= ratio < 0.65


def test_stages_are_billed_as_what_they_share_out() -> None:
    """A stage adds gradients up and drops whole layers with each micro-batch, as without one."""
    batch = BatchPolicy(1, 4)
    tables = [
        run(batch=batch, sharding=ShardingPolicy(4, stage, pipeline_parallel=2)).table
        for stage in (0, 1, 3)
    ]
    replicas, first, third = (table.peaks[Phase.BACKWARD][Tier.DEVICE] for table in tables)
    assert first[Kind.PARAMETERS] == pytest.approx(replicas[Kind.PARAMETERS] / 2, rel=0.05)
    assert third[Kind.GRADIENTS] < 0.6 * first[Kind.GRADIENTS]


def test_gpipe_has_every_micro_batch_in_flight() -> None:
    def activations(schedule: PipelineSchedule, micro_batches: int) -> int:
        sharding = ShardingPolicy(2, pipeline_parallel=2, pipeline_schedule=schedule)
        found = run(batch=BatchPolicy(1, micro_batches), sharding=sharding)
        return found.table.peaks[Phase.FORWARD][Tier.DEVICE][Kind.ACTIVATIONS]

    alternating, all_first = PipelineSchedule("1f1b"), PipelineSchedule("gpipe")
    assert activations(alternating, 8) == activations(alternating, 4)
    assert activations(all_first, 8) > 1.8 * activations(all_first, 4)


def test_interleaved_stages_have_more_in_flight_and_few_stand_for_many() -> None:
    """Two chunks of one layer each: forward of three micro-batches has 2 (p - 1) + p + 1 = 5 halves
    on the first stage, where 1F1B has 2 wholes. A group of three has one more."""
    order = {"pipeline_schedule": PipelineSchedule.INTERLEAVED, "virtual_stages": 2}

    def activations(micro_batches: int, **order: Any) -> int:
        sharding = ShardingPolicy(2, pipeline_parallel=2, **order)
        found = run(batch=BatchPolicy(1, micro_batches), sharding=sharding)
        return found.table.peaks[Phase.FORWARD][Tier.DEVICE][Kind.ACTIVATIONS]

    assert activations(16, **order) == activations(8, **order)
    assert activations(8, **order) > 1.1 * activations(8)
    assert activations(9, **order) > activations(8, **order)


OPTIMIZERS = [OptimizerName.ADAMW, OptimizerName.ADAFACTOR, OptimizerName.LION_8BIT]
PLACEMENTS = [
    PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.5),
    PlacementPolicy(Tier.HOST, Tier.HOST, Tier.HOST),
    PlacementPolicy(Tier.HOST, Tier.NVME),
    PlacementPolicy(Tier.HOST, Tier.NVME, Tier.HOST, Tier.HOST),
]
SHARDINGS = [
    ShardingPolicy(), ShardingPolicy(4, 3), ShardingPolicy(4, 1, tensor_parallel=2),
    ShardingPolicy(4, 3, pipeline_parallel=2), ShardingPolicy(8, 2, 2, 2),
    ShardingPolicy(4, 3, replicas=2),
]  # fmt: skip


# Every placement with every sharding; optimizers and cards take turns.
COMBINED = [
    (OPTIMIZERS[index % 3], placement, sharding, (None, (8, 0))[index // 2 % 2])
    for index, (placement, sharding) in enumerate(product(PLACEMENTS, SHARDINGS))
]


@pytest.mark.parametrize(("name", "placement", "sharding", "card"), every(5, COMBINED))
def test_states_are_those_of_the_closed_form_whatever_is_combined(
    name: OptimizerName, placement: PlacementPolicy, sharding: ShardingPolicy, card: Any
) -> None:
    """Nothing is counted twice or lost: each kind, over all tiers but for where the host pins."""
    policies = Policies(
        batch=BatchPolicy(1, 2),
        optimizer=OptimizerPolicy(name),
        placement=placement,
        precision=PrecisionPolicy("bf16"),
        sharding=sharding,
    )
    table = dry_run(CONFIG, policies, WORKLOAD, card=card).table
    closed = tensor_state_bytes(tensors_of(CONFIG, policies), policies)
    streams = placement.parameters is not Tier.DEVICE
    for kind in (Kind.PARAMETERS, Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES):
        for tiers in ((Tier.DEVICE,), (Tier.HOST, Tier.PINNED), (Tier.NVME,)):
            found = sum(step(table, tier).get(kind, 0) for tier in tiers)
            expected = sum(closed.get(tier, {}).get(kind, 0) for tier in tiers)
            if kind is Kind.PARAMETERS and tiers == (Tier.DEVICE,) and streams:
                assert found <= expected, "some of those that visit may be gone"
            else:
                assert found == expected, (kind, tiers)


@pytest.mark.parametrize("name", [OptimizerName.ADAMW, OptimizerName.ADAFACTOR])
def test_files_need_memory_for_one_parameter(name: OptimizerName) -> None:
    """Whatever the optimizer: parameters and states are written one by one."""
    policies = Policies(optimizer=OptimizerPolicy(name))
    found = dry_run(CONFIG, policies, WORKLOAD, card=(8, 0))
    largest = max(CONFIG.vocab_size, CONFIG.intermediate_size) * CONFIG.hidden_size
    assert found.table.peaks[Phase.SAVE][Tier.HOST][Kind.BUFFERS] == 4 * largest


def test_shapes_are_those_of_the_model_with_its_adapters() -> None:
    tensors = tensors_of(CONFIG, Policies(adapter=AdapterPolicy(rank=2)))
    assert len(tensors.layers) == 8
    trained = tensors.count(trainable=True)
    assert trained == run(adapter=AdapterPolicy(rank=2)).trainable
    packed = tensors_of(
        CONFIG, Policies(adapter=AdapterPolicy(rank=2), quantisation=QuantisationPolicy())
    )
    assert packed.count(trainable=True) == trained
    everything = packed.count(trainable=False) + packed.count(trainable=False, quantised=True)
    assert everything == tensors.count(trainable=False)
