from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from tightfit.errors import UnsupportedError
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    LossPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)


def test_global_batch_is_micro_batch_times_accumulation_times_data_parallel_ranks() -> None:
    assert BatchPolicy(3, 4).sequences_per_rank == 12
    sharding = ShardingPolicy(ranks=16, tensor_parallel=2, pipeline_parallel=2)
    assert sharding.data_parallel == 4
    assert Policies(batch=BatchPolicy(3, 4), sharding=sharding).global_batch_size == 48


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (ShardingPolicy(ranks=0), "start at 1"),
        (ShardingPolicy(zero_stage=4), "zero_stage is 0, 1, 2 or 3"),
        (ShardingPolicy(ranks=6, tensor_parallel=4), "take a multiple of 4"),
    ],
)
def test_ranks_that_cannot_be_shared_out_are_refused(
    sharding: ShardingPolicy, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Policies(sharding=sharding)


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


@pytest.mark.parametrize(
    ("gradients", "states"),
    [(Tier.DEVICE, Tier.DEVICE), (Tier.HOST, Tier.HOST), (Tier.HOST, Tier.NVME)],
)
def test_gradients_go_where_the_update_runs(gradients: Tier, states: Tier) -> None:
    Policies(placement=PlacementPolicy(gradients, states))


@pytest.mark.parametrize(
    ("gradients", "states", "message"),
    [
        (Tier.DEVICE, Tier.HOST, "gradients on device with optimizer states on host"),
        (Tier.HOST, Tier.DEVICE, "gradients on host with optimizer states on device"),
        (Tier.NVME, Tier.NVME, "gradients can be placed on device or host, not on nvme"),
        (Tier.PINNED, Tier.HOST, "gradients can be placed on device or host, not on pinned"),
    ],
)
def test_placements_that_cannot_work_are_refused(
    gradients: Tier, states: Tier, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Policies(placement=PlacementPolicy(gradients, states))


@pytest.mark.parametrize("batch", [BatchPolicy(0, 1), BatchPolicy(1, 0), BatchPolicy(-1, 2)])
def test_empty_batches_are_refused(batch: BatchPolicy) -> None:
    with pytest.raises(UnsupportedError, match="at least 1"):
        Policies(batch=batch)


def test_chunks_of_no_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="chunk_tokens must be at least 1, not 0"):
        Policies(loss=LossPolicy(chunk_tokens=0))
