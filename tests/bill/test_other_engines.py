from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

from tightfit.bill.other_engines import (
    DeepSpeedBuckets,
    OtherEngine,
    OtherRun,
    Recompute,
    Widths,
)
from tightfit.bill.other_megatron import MegatronModel, megatron_bytes
from tightfit.bill.other_states import (
    Counts,
    Moment,
    gather_pool_bytes,
    gradient_share,
    state_bytes,
)
from tightfit.bill.table import Kind
from tightfit.bill.textbook_activations import (
    Recomputation,
    Transformer,
    layer_activation_bytes,
)
from tightfit.policies import AdapterPolicy

GB = 10**9
MIXED = Widths(master=4)  # bf16 weights and gradients, fp32 master and AdamW states
NO_BUCKETS = DeepSpeedBuckets(reduce=0, live=0)


def model(total: int, *, trainable: int | None = None, adapters: int = 0) -> Counts:
    """32 layers that hold nine tenths of the parameters."""
    layer = total * 9 // 10 // 32
    root = total - 32 * layer
    return Counts(
        base=total,
        layer=layer,
        root=root,
        linear=32 * layer,
        head=root // 2,
        largest=layer // 4,
        trainable=total if trainable is None else trainable,
        adapters=adapters,
        trainable_layer=layer,
    )


def between_steps(run: OtherRun, counts: Counts) -> Mapping[Kind, float]:
    """What is resident, and the gradients that a whole backward leaves."""
    states = state_bytes(run, counts)
    kinds = dict(states.resident)
    kinds[Kind.GRADIENTS] += states.during[Moment.STEP][Kind.GRADIENTS]
    return kinds


@pytest.mark.parametrize(
    ("engine", "gigabytes"),
    [
        (OtherEngine.SINGLE, 120.0),
        (OtherEngine.ZERO1, 31.4),
        (OtherEngine.ZERO2, 16.6),
        (OtherEngine.ZERO3, 1.9),
    ],
)
def test_the_zero_papers_model_of_7_5b_on_64_cards(engine: OtherEngine, gigabytes: float) -> None:
    """https://arxiv.org/abs/1910.02054, figure 1; buckets, which it leaves out, are of no size."""
    run = OtherRun(engine=engine, shards=64, widths=MIXED, deepspeed=NO_BUCKETS)
    total = sum(between_steps(run, model(7_500_000_000)).values())
    assert total / GB == pytest.approx(gigabytes, abs=0.05)


def test_deepspeeds_own_estimator_is_between_states_and_step() -> None:
    """DeepSpeed's docs ("Memory Requirements"): a model of 2851M parameters on 8 cards takes
    15.93 GiB with stage 2, 4 + 16/8 bytes each; the estimator knows no buckets."""
    counts = model(2_851_000_000)
    run = OtherRun(engine=OtherEngine.ZERO2, shards=8, widths=MIXED, deepspeed=NO_BUCKETS)
    states = state_bytes(run, counts)
    resident = sum(states.resident.values())
    assert pytest.approx(6 * counts.base, rel=1e-3) == 15.93 * 2**30
    assert resident < 6 * counts.base
    assert resident + sum(states.during[Moment.STEP].values()) == (2 + 14 / 8 + 6 / 8) * counts.base


def test_deepspeeds_two_buckets_of_its_default_size_take_two_gigabytes() -> None:
    run = OtherRun(engine=OtherEngine.ZERO2, shards=8, widths=MIXED)
    assert state_bytes(run, model(GB)).resident[Kind.COLLECTIVES] == 2 * 5e8 * 2


def test_stage_3_without_checkpointing_keeps_every_gathered_weight() -> None:
    counts = model(7 * GB)
    run = OtherRun(engine=OtherEngine.ZERO3, shards=8, widths=MIXED)
    kept = state_bytes(run, counts).during[Moment.BACKWARD][Kind.COLLECTIVES]
    assert kept == 2 * counts.base
    full = replace(run, recompute=Recompute.FULL)
    assert state_bytes(full, counts).during[Moment.BACKWARD][Kind.COLLECTIVES] == 2 * 1e9
    alone = replace(run, shards=1)
    assert state_bytes(alone, counts).during[Moment.BACKWARD][Kind.COLLECTIVES] == 0


def test_ddp_copies_gradients_into_buckets_as_large() -> None:
    run = OtherRun(engine=OtherEngine.DDP, shards=8)
    kinds = between_steps(run, model(GB))
    assert kinds[Kind.COLLECTIVES] == kinds[Kind.GRADIENTS] == 2 * GB


def test_fsdp2_gathers_the_layer_and_the_next_beside_the_outermost_group() -> None:
    counts = model(8 * GB)
    run = OtherRun(engine=OtherEngine.FSDP2, shards=8, widths=Widths(weight=4, gradient=4))
    states = state_bytes(run, counts)
    assert states.resident[Kind.PARAMETERS] == 4 * counts.base / 8
    assert states.during[Moment.FORWARD][Kind.COLLECTIVES] == 2 * (counts.root + 2 * counts.layer)
    assert states.during[Moment.STEP][Kind.GRADIENTS] == 4 * counts.base / 8
    split = state_bytes(replace(run, keep_root=False), counts)
    assert split.during[Moment.FORWARD][Kind.COLLECTIVES] == 2 * 2 * counts.layer
    whole = state_bytes(replace(run, keep_layers=True), counts)
    assert whole.during[Moment.FORWARD][Kind.COLLECTIVES] == 2 * counts.base


def test_fsdp2s_gathers_hold_a_pool_of_the_largest_group() -> None:
    counts = model(8 * GB)
    run = OtherRun(engine=OtherEngine.FSDP2, shards=8)
    assert gather_pool_bytes(run, counts) == 2 * (counts.root - counts.layer)
    assert gather_pool_bytes(replace(run, engine=OtherEngine.FSDP1), counts) == 0


@pytest.mark.parametrize(
    ("run", "share"),
    [
        (OtherRun(), 1),
        (OtherRun(engine=OtherEngine.FSDP2, shards=8, widths=Widths(gradient=4)), 2 / 8),
        (OtherRun(engine=OtherEngine.FSDP1, shards=8, no_sync=True), 1),
        (OtherRun(engine=OtherEngine.ZERO2, shards=8), 0),
        (OtherRun(optimizer_in_backward=True), 0),
        (OtherRun(adapter=AdapterPolicy(), widths=Widths(adapter=4, gradient=4)), 1),
    ],
)
def test_how_much_of_a_gradient_stays(run: OtherRun, share: float) -> None:
    assert gradient_share(run) == share


def test_a_quantised_base_and_its_adapters() -> None:
    """QLoRA (https://arxiv.org/abs/2305.14314), figure 1: half a byte per weight and its scales."""
    adapters = 10_000_000
    counts = model(GB, trainable=adapters, adapters=adapters)
    widths = Widths(quantised=0.5 + 4 / 64, adapter=4, gradient=4)
    run = OtherRun(widths=widths, adapter=AdapterPolicy())
    kinds = between_steps(run, counts)
    ends = counts.base - counts.linear
    assert kinds[Kind.PARAMETERS] == counts.linear * 0.5625 + ends * 2 + adapters * 4
    assert kinds[Kind.OPTIMIZER_STATES] == 8 * adapters
    unpacked = state_bytes(run, counts).during[Moment.BACKWARD][Kind.TEMPORARIES]
    assert unpacked == 2 * counts.largest


def test_offloaded_states_are_not_on_the_card() -> None:
    run = OtherRun(engine=OtherEngine.ZERO3, shards=2, widths=MIXED, deepspeed=NO_BUCKETS)
    offloaded = replace(run, offload_optimizer=True, offload_parameters=True)
    kinds = between_steps(offloaded, model(GB))
    assert {kind for kind, size in kinds.items() if size} == {Kind.GRADIENTS}


@pytest.mark.parametrize(
    ("tensor", "sequence", "recomputation"),
    [*product((1, 4), (False, True), (Recomputation.NONE, Recomputation.SELECTIVE))],
)
def test_megatrons_layers_agree_with_its_paper(
    tensor: int, sequence: bool, recomputation: Recomputation
) -> None:
    """sbh(34 + 5as/h) of https://arxiv.org/abs/2205.05198, which the textbook has, from tensors."""
    paper = Transformer(sequence=1024, batch=4, hidden=512, heads=8, layers=1)
    expected = layer_activation_bytes(
        paper, recomputation, tensor_parallel=tensor, sequence_parallel=sequence
    )
    sizes = MegatronModel(1, 512, 8, 8, 64, 2048, vocabulary=0)
    run = OtherRun(
        engine=OtherEngine.MEGATRON,
        micro_batch_size=4,
        sequence_length=1024,
        tensor_parallel=tensor,
        sequence_parallel=sequence,
        flash_attention=recomputation is Recomputation.SELECTIVE,
    )
    assert megatron_bytes(sizes, run)["backward head"][Kind.ACTIVATIONS] == expected


def test_megatrons_distributed_optimizer_shares_all_but_weights_and_gradients() -> None:
    """docs: "Distributed Optimizer": 18 bytes per parameter without it, 6 + 12/d with it."""
    sizes = MegatronModel(32, 4096, 32, 32, 128, 16384, vocabulary=0)
    count = 32 * 12 * 4096**2
    for shards, each in ((1, 18), (4, 6 + 12 / 4)):
        run = OtherRun(engine=OtherEngine.MEGATRON, shards=shards)
        assert sum(megatron_bytes(sizes, run)["step"].values()) == each * count


def test_interleaved_chunks_of_other_micro_batches_wait_on_the_last_stage() -> None:
    sizes = MegatronModel(32, 4096, 32, 32, 128, 16384, vocabulary=0)
    run = OtherRun(engine=OtherEngine.MEGATRON, pipeline_parallel=4)
    plain = megatron_bytes(sizes, run)["backward head"][Kind.ACTIVATIONS]
    chunked = megatron_bytes(replace(sizes, virtual_stages=8), run)["backward head"]
    assert chunked[Kind.ACTIVATIONS] == plain * (7 * 4 + 1) / 8
