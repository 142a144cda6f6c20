"""What is read and written beside matrix products takes its time, once where it happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.facts.workload import Workload
from tightfit.planner.collectives import ModelSizes
from tightfit.planner.computing import Computing, ModelCost, computing_of
from tightfit.planner.rates import Rates
from tightfit.planner.traffic import Traffic
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

# Products take no time at all; a byte takes a second, on a CPU a tenth of that in place and two
# seconds where it is new.
INFINITE = 1e30
RATES = Rates(
    matmul_flops_per_second=INFINITE, memory_bytes_per_second=1, copy_bytes_per_second=1,
    host_memory_bytes_per_second=10, device_optimizer_parameters_per_second=1,
    host_optimizer_parameters_per_second=1, operation_seconds=0,
)  # fmt: skip
SIZES = ModelSizes(1000, 0, 0, 10, 4, 10, 20, tied=False)
COST = ModelCost(
    parameters=1000, trainable=1000, matmul_parameters=0, head_parameters=200, layers=4,
    hidden_size=10, activation_bytes_per_token=0, sizes=SIZES,
)  # fmt: skip
FOUR = Workload(sequence_length=2, global_batch_size=4)
NOTHING_MOVES = Traffic()
LOGITS = 8 * 20 * 4 * 10  # tokens, vocabulary, bytes, times
ENDS = 200 * (4 * 5 + 4)  # of the output layer and of the embedding, a micro-batch
MADE = 1000 * 4  # gradients, once


def computing(
    policies: Policies,
    cost: ModelCost = COST,
    traffic: Traffic = NOTHING_MOVES,
    *,
    on_card: bool = True,
) -> Computing:
    return computing_of(cost, policies, FOUR, RATES, traffic, on_card=on_card)


def chunked(steps: int, **more: object) -> Policies:
    loss = LossPolicy(LossKind.CHUNKED)
    return replace(Policies(loss=loss, batch=BatchPolicy(4 // steps, steps)), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_gradients_of_later_micro_batches_are_added(steps: int) -> None:
    found = computing(chunked(steps))
    assert found.forward == pytest.approx(LOGITS)
    assert found.backward == pytest.approx(MADE + steps * ENDS + (steps - 1) * 3 * 1000 * 4)
    assert found.recompute == pytest.approx(0)


@pytest.mark.parametrize(("gradients", "staying"), [(Tier.DEVICE, 1000), (Tier.HOST, 400)])
def test_those_that_leave_the_device_are_not_added_there(gradients: Tier, staying: int) -> None:
    """A part of the layers may leave, and the updates of those whose gradients wait."""
    placement = PlacementPolicy(gradients, Tier.HOST, optimizer_fraction=0.6)
    found = computing(chunked(2, placement=placement), traffic=Traffic(updated_off=600))
    assert found.backward == pytest.approx(MADE + 2 * ENDS + 3 * staying * 4)


@pytest.mark.parametrize(("stage", "share"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_shards_are_added_where_gradients_are_scattered_in_each_micro_batch(
    stage: int, share: int
) -> None:
    sharding = ShardingPolicy(ranks=2, zero_stage=stage)
    found = computing(chunked(2, sharding=sharding))
    assert found.backward == pytest.approx(MADE + 2 * ENDS + 3 * 1000 * 4 / share)


def test_of_a_tied_embedding_two_gradients_become_one() -> None:
    tied = replace(COST, sizes=replace(SIZES, tied=True))
    more = computing(chunked(1), tied).backward - computing(chunked(1)).backward
    assert more == pytest.approx(3 * 200 * 4)


def test_a_cpu_adds_in_place_faster_than_into_new_memory() -> None:
    found = computing(chunked(2), on_card=False)
    new = MADE + 2 * 200 * (4 + 4)
    in_place = 2 * 200 * 4 * 4 + 3 * 1000 * 4
    assert found.backward == pytest.approx(2 * new + in_place / 10)
    assert found.forward == pytest.approx(8 * 20 * 4 * (2 + 9 / 10))


def test_what_layers_leave_is_made_again_by_checkpointing() -> None:
    cost = replace(COST, activation_bytes_per_token=7)
    found = computing(chunked(1, checkpointing=CheckpointingPolicy(True)), cost)
    assert found.recompute == pytest.approx(2 * 8 * 7)
    assert found.forward == pytest.approx(2 * 8 * 7 + LOGITS)
    assert found.backward == pytest.approx(3 * 8 * 7 + MADE + ENDS)


@pytest.mark.parametrize("checkpointing", [CheckpointingPolicy(), CheckpointingPolicy(True)])
def test_a_packed_base_is_unpacked_in_every_pass_through_it(
    checkpointing: CheckpointingPolicy,
) -> None:
    sizes = replace(SIZES, trainable=0, frozen=0, quantised=640)
    cost = replace(COST, trainable=0, sizes=sizes)
    packed = QuantisationPolicy(block=64, double=False)
    found = computing(
        chunked(
            2,
            adapter=AdapterPolicy(rank=1),
            quantisation=packed,
            precision=PrecisionPolicy("bf16"),
            checkpointing=checkpointing,
        ),
        cost,
    )
    once = 2 * (640 / 2 + 10 * 4 + 640 * 2)  # of two micro-batches: nibbles, scales, values
    assert found.forward - LOGITS == pytest.approx(once)
    assert found.backward == pytest.approx(once)
    assert found.recompute == pytest.approx(once if checkpointing.enabled else 0)
