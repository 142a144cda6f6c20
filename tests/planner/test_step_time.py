"""What overlaps in the engine overlaps in the prediction, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.bill.table import MemoryTable
from tightfit.dry_run import DryRun, Shape
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import ModelSizes
from tightfit.planner.computing import ModelCost
from tightfit.planner.rates import Rates
from tightfit.planner.step_time import predict_step_time
from tightfit.planner.traffic import Traffic, traffic_of
from tightfit.policies import BatchPolicy, CheckpointingPolicy, PlacementPolicy, Policies, Tier

# Forward takes 2 seconds, backward 4; attention and element-wise work nothing, and reading the
# matrices less than multiplying with them.
MEMORY = 1000
WORKLOAD = Workload(sequence_length=1, global_batch_size=1)
COST = ModelCost(
    parameters=0, trainable=0, matmul_parameters=10, head_parameters=0, layers=1, hidden_size=0,
    activation_bytes_per_token=0, sizes=ModelSizes(0, 0, 0, 0, 1, 0, 0, tied=True),
)  # fmt: skip
RATES = Rates(
    matmul_flops_per_second=10, memory_bytes_per_second=MEMORY, copy_bytes_per_second=1,
    host_memory_bytes_per_second=MEMORY, device_optimizer_parameters_per_second=1,
    host_optimizer_parameters_per_second=1,
    operation_seconds=0, disk_read_bytes_per_second=1, disk_write_bytes_per_second=1,
)  # fmt: skip


def seconds(
    traffic: Traffic, placement: PlacementPolicy | None = None, *, on_card: bool, **policies: Any
) -> dict[str, float]:
    chosen = Policies(placement=placement or PlacementPolicy(), **policies)
    found = predict_step_time(COST, chosen, WORKLOAD, RATES, traffic, on_card=on_card).to_json()
    assert found["total"] == pytest.approx(sum(v for k, v in found.items() if k != "total"))
    assert found["compute"] == pytest.approx(6)
    return found


@pytest.mark.parametrize(
    ("traffic", "card", "copied", "made"),
    [
        (Traffic(parameters_in=1), 0, 0, 2),
        (Traffic(parameters_in=5), (5 - 2) + (5 - 4), 0, 10),
        (Traffic(activations=3), 3 - 2, 3, 3),
        (Traffic(parameters_in=2, activations=2), 0, 2, 6),  # both ways at once in forward
        (Traffic(parameters_in=3, activations=2), (3 - 2) + (3 + 2 - 4), 2, 8),
        (Traffic(gradients_out=5), 5 - 4, 5, 0),
        (Traffic(gradients_late=5), 5, 5, 0),
    ],
)
def test_copies_hide_behind_a_cards_own_computing(
    traffic: Traffic, card: int, copied: int, made: int
) -> None:
    assert seconds(traffic, on_card=True)["copies"] == pytest.approx(card)
    cpu = seconds(traffic, on_card=False)["copies"]
    assert cpu == pytest.approx(copied + made / (MEMORY / 2))


@pytest.mark.parametrize("on_card", [True, False])
def test_what_the_host_adds_takes_its_time_beside_what_is_copied(on_card: bool) -> None:
    behind = 4 if on_card else 0
    found = seconds(Traffic(gradients_out=5, gradients_added=1000), on_card=on_card)
    assert found["copies"] == pytest.approx(5 + 3 * 1000 / MEMORY - behind)


def test_recomputing_hides_more() -> None:
    busy = CheckpointingPolicy(True)
    found = seconds(Traffic(gradients_out=7), on_card=True, checkpointing=busy)
    assert found["recompute"] == pytest.approx(2)
    assert found["copies"] == pytest.approx(7 - 4 - 2)


def test_without_prefetch_every_layer_waits() -> None:
    found = seconds(Traffic(parameters_in=1), PlacementPolicy(prefetch=0), on_card=True)
    assert found["copies"] == pytest.approx(2)


LAZY = PlacementPolicy(Tier.HOST, Tier.HOST, lazy_step=True)
LATE = PlacementPolicy(Tier.HOST, Tier.HOST)
UPDATE = Traffic(updated_off=5, updated_first=1, values_in=3, disk_read=4, disk_written=4)


@pytest.mark.parametrize(
    ("placement", "on_card", "optimizer", "copies", "disk"),
    [
        # The first module's update is waited for, of the rest what forward does not hide.
        (LAZY, True, 1 + (4 - 2), 0, 8 - 4),
        (LATE, True, 5, 0, 8 - 4),
        # A CPU's forward and update take each other's time; only the disk needs none of it.
        (LAZY, False, 5, 3, 8 - 4 - 2),
        (LATE, False, 5, 3, 8 - 4),
    ],
)
def test_a_lazy_update_hides_behind_forward(
    placement: PlacementPolicy, on_card: bool, optimizer: int, copies: int, disk: int
) -> None:
    cost = replace(COST, trainable=5)
    found = predict_step_time(
        cost, Policies(placement=placement), WORKLOAD, RATES, UPDATE, on_card=on_card
    )
    norm = 3 * 5 * 4 / MEMORY
    assert found.optimizer == pytest.approx(norm + optimizer)
    assert (found.copies, found.disk) == pytest.approx((copies, disk))


def test_only_the_first_micro_batchs_forward_hides_an_update() -> None:
    cost = replace(COST, trainable=5)
    twice = Policies(placement=LAZY, batch=BatchPolicy(1, 2))
    found = predict_step_time(cost, twice, WORKLOAD, RATES, UPDATE, on_card=True)
    assert found.optimizer == pytest.approx(3 * 5 * 4 / MEMORY + 1 + (4 - 1))


def test_what_is_read_from_disk_hides_behind_computing_everywhere() -> None:
    traffic = Traffic(disk_parameters=3, disk_gradients=2)
    for on_card in (True, False):
        assert seconds(traffic, on_card=on_card)["disk"] == pytest.approx((3 - 2) + (3 + 2 - 4))


# What moves

RUN = DryRun(MemoryTable({}), 1000, 0, 0, Shape(10, 1, 10, 10, True, True))  # 90 in each layer


def traffic(placement: PlacementPolicy, *, micro_batches: int = 1) -> Traffic:
    policies = Policies(placement=placement, batch=BatchPolicy(1, micro_batches))
    return traffic_of(RUN, policies, 500.0)


def test_nothing_moves_on_the_device() -> None:
    assert traffic(PlacementPolicy()) == Traffic()


def test_gradients_go_out_for_every_micro_batch_and_values_come_back_once() -> None:
    found = traffic(PlacementPolicy(Tier.HOST, Tier.HOST), micro_batches=3)
    assert (found.gradients_out, found.values_in) == (3 * 4000, 4000)
    assert (found.updated_off, found.updated_first) == (1000, 100)
    late = traffic(PlacementPolicy(Tier.DEVICE, Tier.HOST), micro_batches=3)
    assert (late.gradients_out, late.gradients_late) == (0, 4000)


def test_a_part_moves_its_share() -> None:
    found = traffic(PlacementPolicy(Tier.HOST, Tier.HOST, optimizer_fraction=0.3))
    assert (found.gradients_out, found.updated_off) == pytest.approx((4 * 270, 270))
    assert found.updated_first == 0, "the embedding stays with the layers that stay"


def test_parameters_that_live_elsewhere_are_fetched_and_not_brought_back() -> None:
    found = traffic(PlacementPolicy(Tier.HOST, Tier.HOST, Tier.HOST), micro_batches=2)
    assert (found.parameters_in, found.values_in) == (2 * 4000, 0)
    assert found.copied_bytes == 2 * 2 * 4000 + 2 * 4000


def test_all_layers_activations_but_the_lasts_leave() -> None:
    assert traffic(PlacementPolicy(activations=Tier.HOST)).activations == pytest.approx(450)


def test_what_wears_a_disk() -> None:
    states = traffic(PlacementPolicy(Tier.HOST, Tier.NVME))
    assert (states.disk_read, states.written_bytes) == (12000, 12000)
    everything = PlacementPolicy(Tier.NVME, Tier.NVME, Tier.NVME)
    found = traffic(everything, micro_batches=2)
    assert found.disk_parameters == 2 * 4000
    # fp32 parameters are their own masters; they, two moments, and gradients of two micro-batches.
    assert found.written_bytes == 4000 + 8000 + 2 * 4000
    assert found.disk_read == 4000 + 8000 + 4000, "a step's own, of summed gradients"
    only = traffic(PlacementPolicy(Tier.HOST, Tier.HOST, Tier.NVME))
    assert (only.disk_read, only.written_bytes) == (4000, 4000)
