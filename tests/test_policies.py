from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from tightfit.errors import UnsupportedError
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    LossPolicy,
    Master,
    OptimizerPolicy,
    PipelineSchedule,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

INTERLEAVED = PipelineSchedule.INTERLEAVED


def test_global_batch_is_micro_batch_times_accumulation_times_data_parallel_ranks() -> None:
    assert BatchPolicy(3, 4).sequences_per_rank == 12
    sharding = ShardingPolicy(ranks=16, tensor_parallel=2, pipeline_parallel=2)
    assert sharding.data_parallel == 4
    assert replace(sharding, zero_stage=3, replicas=2).data_parallel == 4
    assert Policies(batch=BatchPolicy(3, 4), sharding=sharding).global_batch_size == 48


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (ShardingPolicy(ranks=0), "start at 1"),
        (ShardingPolicy(zero_stage=4), "zero_stage is 0, 1, 2 or 3"),
        (ShardingPolicy(ranks=6, tensor_parallel=4), "take a multiple of 4"),
        (ShardingPolicy(8, 3, replicas=0), "start at 1"),
        (ShardingPolicy(8, 0, replicas=2), "every rank is a replica"),
        (ShardingPolicy(8, 3, replicas=3), r"take one of \[2, 4\]"),
        (ShardingPolicy(8, 3, replicas=8), r"take one of \[2, 4\]"),
        (ShardingPolicy(4, 1, 2, replicas=2), "leave replicas out"),
        (ShardingPolicy(2, pipeline_schedule=INTERLEAVED, virtual_stages=2), "without a pipeline"),
        (ShardingPolicy(2, 0, 1, 2, 1, INTERLEAVED), "interleaved needs 2 or more"),
        (ShardingPolicy(2, 0, 1, 2, virtual_stages=2), "the others have 1"),
        (ShardingPolicy(2, stage_layers=(2, 1)), "pipeline_layers 2,1 without a pipeline"),
        (ShardingPolicy(2, 0, 1, 2, stage_layers=(3,)), "1 numbers of layers for .*_size 2; give"),
        (
            ShardingPolicy(2, 0, 1, 2, 1, INTERLEAVED, 2, (1, 2)),
            "2 numbers of layers for pipeline_parallel_size 2 x virtual_pipeline_stages 2 = 4;",
        ),
        (ShardingPolicy(2, 0, 1, 2, stage_layers=(3, 0)), "3,0: each has one layer or more"),
    ],
)
def test_ranks_that_cannot_be_shared_out_are_refused(
    sharding: ShardingPolicy, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Policies(sharding=sharding)


@pytest.mark.parametrize(("stage", "replicas", "shards"), [(0, 1, 1), (1, 1, 8), (3, 2, 4)])
def test_a_replica_is_shared_by_its_own_ranks(stage: int, replicas: int, shards: int) -> None:
    assert ShardingPolicy(16, stage, 2, replicas=replicas).shards == shards


def test_a_quantised_base_needs_adapters() -> None:
    with pytest.raises(UnsupportedError, match="add adapters"):
        Policies(quantisation=QuantisationPolicy())
    Policies(quantisation=QuantisationPolicy(), adapter=AdapterPolicy())


def test_parameter_bytes() -> None:
    assert PrecisionPolicy("fp32").parameter_bytes == 4
    assert PrecisionPolicy("bf16").parameter_bytes == 2


def test_policies_are_frozen_and_hashable() -> None:
    policies = Policies()
    with pytest.raises(FrozenInstanceError):
        policies.batch = BatchPolicy(2, 2)  # type: ignore[misc]
    assert len({policies, Policies(), Policies(batch=BatchPolicy(2, 1))}) == 2


DEVICE, HOST, NVME, PINNED = Tier.DEVICE, Tier.HOST, Tier.NVME, Tier.PINNED
LORA = AdapterPolicy()
BF16, SPLIT = PrecisionPolicy("bf16"), OptimizerPolicy(master=Master.SPLIT)
AWAY = PlacementPolicy(HOST, HOST, HOST)


@pytest.mark.parametrize(
    ("gradients", "states"),
    [
        (DEVICE, DEVICE), (HOST, HOST), (DEVICE, HOST), (DEVICE, NVME), (HOST, NVME), (NVME, NVME),
    ],
)  # fmt: skip
def test_gradients_add_up_where_the_update_runs_or_before(gradients: Tier, states: Tier) -> None:
    Policies(placement=PlacementPolicy(gradients, states))


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"placement": PlacementPolicy(HOST, DEVICE)}, "gradients on host with optimizer states"),
        ({"placement": PlacementPolicy(NVME, HOST)}, "gradients on nvme with optimizer states"),
        ({"placement": PlacementPolicy(PINNED, HOST)}, "say host"),
        ({"placement": PlacementPolicy(activations=NVME)}, "device or host, not on nvme"),
        ({"placement": PlacementPolicy(optimizer_fraction=0.0)}, "optimizer_fraction is 0.0"),
        ({"placement": PlacementPolicy(parameter_fraction=1.5)}, "parameter_fraction is 1.5"),
        ({"placement": PlacementPolicy(prefetch=-1)}, "prefetch is -1"),
        ({"placement": PlacementPolicy(lazy_step=True)}, "lazy_step is for states off the device"),
        ({"placement": PlacementPolicy(parameters=HOST)}, "place all of them off the device first"),
        (
            {"placement": PlacementPolicy(HOST, HOST, HOST, optimizer_fraction=0.5)},
            "place all of them off the device first",
        ),
        ({"optimizer": SPLIT}, "trained in bf16 themselves"),
        ({"optimizer": SPLIT, "precision": BF16, "adapter": LORA}, "trained in bf16 themselves"),
        (
            {"optimizer": SPLIT, "precision": BF16, "placement": PlacementPolicy(HOST, HOST)},
            "the two must be together",
        ),
        (
            {
                "optimizer": SPLIT,
                "precision": BF16,
                "placement": replace(AWAY, parameter_fraction=0.5),
            },
            "the two must be together",
        ),
    ],
)
def test_placements_that_cannot_work_are_refused(policies: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Policies(**policies)


@pytest.mark.parametrize(
    "policies",
    [
        {"placement": AWAY},
        {"placement": PlacementPolicy(parameters=HOST), "adapter": LORA},  # the base alone
        {"placement": AWAY, "precision": BF16, "optimizer": SPLIT},
        {"precision": BF16, "optimizer": SPLIT},
    ],
)
def test_placements_that_work(policies: dict[str, Any]) -> None:
    Policies(**policies)


@pytest.mark.parametrize("batch", [BatchPolicy(0, 1), BatchPolicy(1, 0), BatchPolicy(-1, 2)])
def test_empty_batches_are_refused(batch: BatchPolicy) -> None:
    with pytest.raises(UnsupportedError, match="at least 1"):
        Policies(batch=batch)


def test_chunks_and_slices_of_nothing_are_refused() -> None:
    for empty in (LossPolicy(chunk_tokens=0), LossPolicy(slice_rows=0)):
        with pytest.raises(UnsupportedError, match="chunk_tokens and slice_rows must be at least"):
            Policies(loss=empty)
