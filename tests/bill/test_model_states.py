from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from tightfit.bill.decoder import LayerShape, LinearShape, decoder_tensors
from tightfit.bill.model_states import (
    StateBytes,
    model_state_bytes,
    tensor_state_bytes,
)
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.bill.textbook import Totals, textbook_state_bytes
from tightfit.dry_run import dry_run
from tightfit.facts.workload import Workload
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    Master,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES, Kind.MASTER_WEIGHTS)
HOST = PlacementPolicy(Tier.HOST, Tier.HOST)
FP32, BF16 = PrecisionPolicy("fp32"), PrecisionPolicy("bf16")


@pytest.mark.parametrize(
    ("policies", "device", "host"),
    [
        # Bytes per trainable parameter: weight + gradient + master + two moments.
        (Policies(), 4 + 4 + 8, 0),
        (Policies(placement=HOST), 4, 4 + 4 + 8),
        (Policies(precision=BF16), 2 + 2 + 4 + 8, 0),
        (Policies(precision=BF16, placement=HOST), 2, 2 + 4 + 8),
    ],
)
def test_bytes_per_parameter(policies: Policies, device: int, host: int) -> None:
    table = model_state_bytes(1000, 0, policies)
    assert sum(table[Tier.DEVICE].values()) == 1000 * device
    assert sum(table.get(Tier.HOST, {}).values()) == 1000 * host


def test_frozen_parameters_have_nothing_but_themselves() -> None:
    with_frozen = model_state_bytes(1000, 500, Policies())
    without = model_state_bytes(1000, 0, Policies())
    difference = Counter(with_frozen[Tier.DEVICE])
    difference.subtract(without[Tier.DEVICE])
    assert {kind: count for kind, count in difference.items() if count} == {
        Kind.PARAMETERS: 500 * 4
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapter", [None, AdapterPolicy(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_closed_form_equals_the_dry_run(
    tied: bool,
    adapter: AdapterPolicy | None,
    placement: PlacementPolicy,
    precision: PrecisionPolicy,
) -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    policies = replace(Policies(precision=precision, placement=placement), adapter=adapter)
    run = dry_run(config, policies, Workload(sequence_length=4, global_batch_size=1))
    counted = {tier: _most_of_each(run.table.to_json(), tier) for tier in (Tier.DEVICE, Tier.HOST)}
    closed = model_state_bytes(run.trainable, run.frozen, policies)
    # AdamW's step counters, one fp32 number per trainable tensor, need shapes.
    states = placement.optimizer_states
    counters = counted[states][Kind.OPTIMIZER_STATES] - closed[states][Kind.OPTIMIZER_STATES]
    tensors = 2 * (7 * 2 if adapter else 9) + (0 if adapter else 2 if tied else 3)
    assert counters == 4 * tensors
    layer = LayerShape(
        (*[LinearShape(16, 16)] * 4, *[LinearShape(24, 16)] * 2, LinearShape(16, 24)),
        vectors=(16, 16),
    )
    shapes = decoder_tensors([layer] * 2, 16, 96, policies, tied=tied)
    assert tensor_state_bytes(shapes, policies)[states] == closed[states] | {
        Kind.OPTIMIZER_STATES: counted[states][Kind.OPTIMIZER_STATES]
    }
    counted[states][Kind.OPTIMIZER_STATES] -= counters
    for tier in (Tier.DEVICE, Tier.HOST):
        expected = {kind: count for kind, count in closed.get(tier, {}).items() if count}
        moved = tier is Tier.DEVICE and placement is HOST  # a few gradients on their way
        found = {k: v for k, v in counted[tier].items() if not (moved and k is Kind.GRADIENTS)}
        assert found == expected


def _most_of_each(table: dict[str, dict[str, dict[str, int]]], tier: Tier) -> dict[Kind, int]:
    """Every kind of model states at the peak of the step, where all of them live."""
    kinds = table["step"].get(str(tier), {})
    return {kind: kinds[str(kind)] for kind in STATES if str(kind) in kinds}


def total(table: StateBytes, *kinds: Kind) -> int:
    """Bytes of `kinds`, or of all, on all tiers."""
    counts = [kind_counts.items() for kind_counts in table.values()]
    return sum(count for items in counts for kind, count in items if not kinds or kind in kinds)


@pytest.mark.parametrize(
    ("precision", "placement", "master", "expected"),
    [
        (BF16, PlacementPolicy(), Master.FP32, 4),
        (BF16, PlacementPolicy(), Master.SPLIT, 2),
        (BF16, PlacementPolicy(), Master.SPLIT_8, 1),
        (FP32, PlacementPolicy(), Master.FP32, 0),
        (FP32, HOST, Master.FP32, 4),
        (FP32, PlacementPolicy(Tier.HOST, Tier.HOST, Tier.HOST), Master.FP32, 0),
        (BF16, PlacementPolicy(Tier.HOST, Tier.NVME, Tier.HOST), Master.SPLIT, 2),
    ],
)
def test_masters(
    precision: PrecisionPolicy, placement: PlacementPolicy, master: Master, expected: int
) -> None:
    optimizer = OptimizerPolicy(master=master)
    policies = Policies(precision=precision, placement=placement, optimizer=optimizer)
    table = model_state_bytes(1000, 0, policies)
    assert table[placement.optimizer_states].get(Kind.MASTER_WEIGHTS, 0) == 1000 * expected
    assert total(table, Kind.MASTER_WEIGHTS) == 1000 * expected


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [
        (OptimizerName.ADAMW, 8),
        (OptimizerName.LION, 4),
        (OptimizerName.SGD, 0),
        (OptimizerName.ADAFACTOR, 0),  # rows and columns: unknown without shapes
        (OptimizerName.ADAMW_8BIT, 2 * (1 + 4 / 256)),
        (OptimizerName.ADAMW_COMPACT, 2 * (1 + 4 / 256)),
        (OptimizerName.LION_8BIT, 1 + 4 / 256),
    ],
)
def test_optimizers(name: OptimizerName, bytes_per_parameter: float) -> None:
    table = model_state_bytes(2**20, 0, Policies(optimizer=OptimizerPolicy(name)))
    assert total(table, Kind.OPTIMIZER_STATES) == 2**20 * bytes_per_parameter


def test_adafactor_with_shapes_keeps_a_row_and_a_column() -> None:
    model = ModelTensors((Tensor((1000, 300)),), (), (Tensor((300,)),))
    policies = Policies(optimizer=OptimizerPolicy(OptimizerName.ADAFACTOR))
    table = tensor_state_bytes(model, policies)
    assert total(table, Kind.OPTIMIZER_STATES) == 4 * (1000 + 300 + 300) + 2 * 4


def test_sgd_with_momentum() -> None:
    model = ModelTensors.flat(1000)
    policies = Policies(optimizer=OptimizerPolicy(OptimizerName.SGD))
    assert total(tensor_state_bytes(model, policies), Kind.OPTIMIZER_STATES) == 0
    with_momentum = tensor_state_bytes(model, policies, momentum=True)
    assert total(with_momentum, Kind.OPTIMIZER_STATES) == 4000


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        # 2^20 weights in 2^14 blocks of 64.
        (QuantisationPolicy(double=False), 2**19 + 4 * 2**14),
        (QuantisationPolicy(), 2**19 + 2**14 + 4 * 2**6 + 4),
        (QuantisationPolicy(bits=8), 2**20 + 4 * 2**10),
    ],
    ids=["nf4", "nf4-double", "int8"],
)
def test_a_quantised_base(quantisation: QuantisationPolicy, expected: int) -> None:
    policies = Policies(precision=BF16, adapter=AdapterPolicy(), quantisation=quantisation)
    model = ModelTensors(
        (Tensor((10, 8), trainable=False),),
        ((Tensor((1024, 1024), trainable=False, quantised=True), Tensor((100,))),),
        (),
    )
    table = tensor_state_bytes(model, policies)[Tier.DEVICE]
    assert table[Kind.PARAMETERS] == expected + 2 * 80 + 4 * 100
    assert table[Kind.GRADIENTS] == 4 * 100
    sharded = replace(policies, sharding=ShardingPolicy(ranks=4, zero_stage=3))
    share = tensor_state_bytes(model, sharded)[Tier.DEVICE][Kind.PARAMETERS]
    assert (expected + 560) / 4 <= share <= (expected + 560) / 4 + 80


def test_what_leaves_the_device_visits_it() -> None:
    layer = (Tensor((1000,)),)
    model = ModelTensors((Tensor((50,)),), (layer,) * 6, (Tensor((20,)),))
    for prefetch, visiting in ((0, 1000), (1, 2000), (100, 6070)):
        away = PlacementPolicy(Tier.NVME, Tier.NVME, Tier.NVME, prefetch=prefetch)
        table = tensor_state_bytes(model, Policies(precision=BF16, placement=away))
        assert table[Tier.DEVICE] == {Kind.PARAMETERS: 2 * visiting}
        assert table[Tier.HOST] == {Kind.OPTIMIZER_STATES: 4 * 8}, "counters of steps"
        # In blocks of 4096 bytes: 12 for each of a layer's 1000 values take three of them.
        on_disk = table[Tier.NVME]
        assert on_disk[Kind.PARAMETERS] == 2 * 4096 * 8
        assert on_disk[Kind.GRADIENTS] == 4096 * 8
        both = on_disk[Kind.MASTER_WEIGHTS] + on_disk[Kind.OPTIMIZER_STATES]
        assert both == 2 * 4096 * (6 * 3 + 2)


def test_fractions_leave_whole_layers() -> None:
    """States of the last ones, parameters of the first; what is around them leaves with all."""
    model = ModelTensors((Tensor((50,)),), ((Tensor((1000,)),),) * 6, (Tensor((20,)),))
    halves = PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.5)
    table = tensor_state_bytes(model, Policies(placement=halves))
    for kind, width in ((Kind.OPTIMIZER_STATES, 8), (Kind.GRADIENTS, 4)):
        counters = 4 * 5 if kind is Kind.OPTIMIZER_STATES else 0
        assert table[Tier.DEVICE][kind] == width * 3070 + counters
    assert table[Tier.HOST][Kind.MASTER_WEIGHTS] == 4 * 3000
    some = PlacementPolicy(Tier.HOST, Tier.HOST, Tier.HOST, parameter_fraction=0.3, prefetch=0)
    table = tensor_state_bytes(model, Policies(placement=some))
    assert table[Tier.HOST][Kind.PARAMETERS] == 4 * 2000
    assert table[Tier.DEVICE][Kind.PARAMETERS] == 4 * (4070 + 1000)
    assert table[Tier.HOST][Kind.MASTER_WEIGHTS] == 4 * 4070, "of those that are not updated there"


SHARDED = Policies(precision=BF16, sharding=ShardingPolicy(ranks=4, zero_stage=1))
LAYERED = ModelTensors((Tensor((64,)),), ((Tensor((400,)),),) * 10, (Tensor((16,)),))


@pytest.mark.parametrize(
    ("stage", "accumulation", "gradients", "passing"),
    [
        # Whole: 4080 parameters; root group: 80; a layer: 400. Two bytes each.
        (0, 1, 8160, 0),
        (1, 1, 2040, 8160 + 960),
        (1, 4, 8160, 8160),
        (2, 1, 2040, 8160 + 960),
        (2, 4, 2040, 8160 + 960),
        (3, 1, 2040, 160 + 2 * 800 + 960),
        (3, 4, 2040, 160 + 2 * 800 + 960),
    ],
)
def test_what_stands_beside_shards(
    stage: int, accumulation: int, gradients: int, passing: int
) -> None:
    policies = replace(
        SHARDED,
        sharding=replace(SHARDED.sharding, zero_stage=stage),
        batch=BatchPolicy(1, accumulation),
    )
    table = tensor_state_bytes(LAYERED, policies)[Tier.DEVICE]
    assert table[Kind.PARAMETERS] == (2040 if stage else 8160)
    assert table[Kind.GRADIENTS] == gradients
    assert table.get(Kind.COLLECTIVES, 0) == passing


def test_the_fullest_stage_of_a_sharded_pipeline() -> None:
    """Stages share out what they have, as a whole model does."""
    sharding = ShardingPolicy(ranks=8, zero_stage=3, pipeline_parallel=2)
    table = tensor_state_bytes(LAYERED, replace(SHARDED, sharding=sharding))[Tier.DEVICE]
    own = 5 * 400 + 64  # the first stage's, which is the larger one by its embedding
    assert table[Kind.PARAMETERS] == table[Kind.GRADIENTS] == 2 * own // 4
    assert 0 < table[Kind.COLLECTIVES] < 2 * own


def test_stages_have_the_layers_that_are_given() -> None:
    def parameter_bytes(*layers: int) -> int:
        sharding = ShardingPolicy(2, pipeline_parallel=2, stage_layers=layers)
        table = tensor_state_bytes(LAYERED, replace(SHARDED, sharding=sharding))
        return table[Tier.DEVICE][Kind.PARAMETERS]

    by_parameters, count = parameter_bytes(), len(LAYERED.layers)
    cuts = [parameter_bytes(first, count - first) for first in range(1, count)]
    assert min(cuts) == by_parameters < max(cuts)
    assert cuts[-1] - cuts[-2] == 2 * 400, "a layer more on the first stage"


def test_offloaded_gradients_add_up_on_the_device_until_they_are_reduced() -> None:
    policies = replace(SHARDED, placement=HOST, batch=BatchPolicy(1, 2))
    table = tensor_state_bytes(LAYERED, policies)
    assert table[Tier.DEVICE][Kind.GRADIENTS] == 4 * table[Tier.HOST][Kind.GRADIENTS]


def test_tensor_parallelism_leaves_norms_whole() -> None:
    model = ModelTensors((), ((Tensor((8, 6), divided_dim=1), Tensor((6,))),), ())
    policies = Policies(sharding=ShardingPolicy(ranks=4, tensor_parallel=4))
    assert tensor_state_bytes(model, policies)[Tier.DEVICE][Kind.PARAMETERS] == 4 * (8 * 2 + 6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_replica_is_shared_by_its_own_ranks_alone(stage: int) -> None:
    """8 ranks as 2 replicas hold what 4 ranks do."""
    replicas = Policies(sharding=ShardingPolicy(8, stage, replicas=2))
    alone = Policies(sharding=ShardingPolicy(4, stage))
    assert tensor_state_bytes(LAYERED, replicas) == tensor_state_bytes(LAYERED, alone)


def test_parts_of_4_bit_weights_have_scales_of_their_own() -> None:
    weight = Tensor((64, 256), divided_dim=0, trainable=False, quantised=True)
    model = ModelTensors((), ((weight,),), ())
    policies = Policies(
        adapter=AdapterPolicy(), quantisation=QuantisationPolicy(), sharding=ShardingPolicy(2, 0, 2)
    )
    values = 32 * 256
    held = tensor_state_bytes(model, policies)[Tier.DEVICE][Kind.PARAMETERS]
    assert held == values // 2 + 4 * values // 64


SHAPES = st.lists(st.integers(1, 50), min_size=1, max_size=2).map(tuple)
GROUPS = st.lists(st.builds(Tensor, SHAPES, trainable=st.booleans()), min_size=1, max_size=4).map(
    tuple
)
MODELS = st.builds(
    ModelTensors, GROUPS, st.lists(GROUPS, min_size=1, max_size=4).map(tuple), GROUPS
)
RANKS = st.integers(2, 9)
KEPT = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES, Kind.MASTER_WEIGHTS)


@settings(max_examples=60)
@given(MODELS, RANKS, st.sampled_from(OptimizerName), st.integers(1, 2))
def test_later_stages_keep_no_more(
    model: ModelTensors, ranks: int, name: OptimizerName, accumulation: int
) -> None:
    policies = Policies(
        precision=BF16, optimizer=OptimizerPolicy(name), batch=BatchPolicy(1, accumulation)
    )
    tables = [
        tensor_state_bytes(model, replace(policies, sharding=ShardingPolicy(ranks, stage)))
        for stage in range(4)
    ]
    kept = [total(table, *KEPT) for table in tables]
    assert kept == sorted(kept, reverse=True)
    assert total(tables[2]) >= total(tables[3])
    assert accumulation > 1 or tables[1] == tables[2]


@given(MODELS, RANKS, st.sampled_from(OptimizerName), st.sampled_from([PlacementPolicy(), HOST]))
def test_shards_of_all_ranks_hold_the_whole(
    model: ModelTensors, ranks: int, name: OptimizerName, placement: PlacementPolicy
) -> None:
    policies = Policies(precision=BF16, optimizer=OptimizerPolicy(name), placement=placement)
    whole = tensor_state_bytes(model, policies)
    share = tensor_state_bytes(model, replace(policies, sharding=ShardingPolicy(ranks, 3)))
    for kind in KEPT:
        assert total(share, kind) <= total(whole, kind) <= ranks * total(share, kind)


@given(MODELS, RANKS, st.sampled_from([0, 2, 3]), st.sampled_from([FP32, BF16]))
def test_never_below_the_textbook(
    model: ModelTensors, ranks: int, stage: int, precision: PrecisionPolicy
) -> None:
    """Stage 1 may be: without accumulation, this engine reduces gradients as it does in stage 2."""
    policies = Policies(precision=precision, sharding=ShardingPolicy(ranks, stage))
    ours = tensor_state_bytes(model, policies)
    assert total(ours) >= total(textbook_state_bytes(Totals.of(model), policies))


@given(MODELS, RANKS, st.sampled_from(range(4)), st.sampled_from(OptimizerName))
def test_counts_alone_give_a_lower_bound(
    model: ModelTensors, ranks: int, stage: int, name: OptimizerName
) -> None:
    policies = Policies(sharding=ShardingPolicy(ranks, stage), optimizer=OptimizerPolicy(name))
    totals = Totals.of(model)
    bound = model_state_bytes(totals.trainable, totals.frozen, policies)[Tier.DEVICE]
    shapes = tensor_state_bytes(model, policies)[Tier.DEVICE]
    for kind, count in bound.items():
        assert count <= shapes.get(kind, 0)


def test_the_bill_imports_no_torch() -> None:
    program = "import sys, tightfit.bill.model_states; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
