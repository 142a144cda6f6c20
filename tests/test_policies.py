from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from tightfit.errors import UnsupportedError
from tightfit.policies import (
    BatchPolicy,
    LossPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)


def test_global_batch_is_micro_batch_times_accumulation() -> None:
    assert BatchPolicy(3, 4).global_batch_size == 12


def test_parameter_bytes() -> None:
    assert PrecisionPolicy("fp32").parameter_bytes == 4
    assert PrecisionPolicy("bf16").parameter_bytes == 2


def test_policies_are_frozen_and_hashable() -> None:
    policies = Policies()
    with pytest.raises(FrozenInstanceError):
        policies.batch = BatchPolicy(2, 2)  # type: ignore[misc]
    assert len({policies, Policies(), Policies(batch=BatchPolicy(2, 1))}) == 2


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_gradients_and_states_together_are_accepted(tier: Tier) -> None:
    Policies(placement=PlacementPolicy(tier, tier))


@pytest.mark.parametrize(
    ("gradients", "states", "message"),
    [
        (Tier.DEVICE, Tier.HOST, "gradients on device with optimizer states on host"),
        (Tier.HOST, Tier.DEVICE, "gradients on host with optimizer states on device"),
        (Tier.NVME, Tier.NVME, "gradients can be placed on device or host, not on nvme"),
        (Tier.HOST, Tier.NVME, "optimizer_states can be placed on device or host, not on nvme"),
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
