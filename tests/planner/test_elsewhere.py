"""The same job with other engines: which can do it, and in the order that they must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from tightfit.bill.other_engines import OtherEngine
from tightfit.planner.elsewhere import Elsewhere, price_elsewhere
from tightfit.policies import (
    AdapterPolicy,
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

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
    num_attention_heads=4, pad_token_id=None,
)  # fmt: skip
BF16 = Policies(precision=PrecisionPolicy("bf16"))


def price(policies: Policies) -> dict[OtherEngine, Elsewhere]:
    return {row.engine: row for row in price_elsewhere(CONFIG, policies, 64, (8, 0))}


@pytest.mark.parametrize(
    ("policies", "engines"),
    [
        (BF16, {OtherEngine.SINGLE}),
        (replace(BF16, sharding=ShardingPolicy(4, 0)), {OtherEngine.DDP}),
        (replace(BF16, sharding=ShardingPolicy(4, 1)), {OtherEngine.ZERO1}),
        (replace(BF16, sharding=ShardingPolicy(4, 2)), {OtherEngine.ZERO2}),
        (
            replace(BF16, sharding=ShardingPolicy(4, 3)),
            {OtherEngine.ZERO3, OtherEngine.FSDP1, OtherEngine.FSDP2},
        ),
        (replace(BF16, sharding=ShardingPolicy(4, 3, tensor_parallel=2)), set()),
        (replace(BF16, placement=PlacementPolicy(Tier.HOST, Tier.NVME)), set()),
    ],
)
def test_engines_that_can_do_the_job(policies: Policies, engines: set[OtherEngine]) -> None:
    found = price(policies)
    assert found.keys() == engines
    assert all(row.device_bytes > row.allocated_bytes > 0 for row in found.values())


def allocated(policies: Policies) -> int:
    return price(policies)[OtherEngine.SINGLE].allocated_bytes


def test_each_technique_takes_less() -> None:
    lora = replace(BF16, adapter=AdapterPolicy(rank=2))
    chunked = replace(BF16, loss=LossPolicy(LossKind.CHUNKED, 16))
    order = [BF16, replace(chunked, checkpointing=CheckpointingPolicy(True))]
    assert [allocated(p) for p in order] == sorted(map(allocated, order), reverse=True)
    assert allocated(replace(lora, quantisation=QuantisationPolicy())) < allocated(lora)
    assert allocated(lora) < allocated(BF16)


def test_the_trainer_keeps_fp32_parameters_under_autocast() -> None:
    """4 + 4 + 8 bytes per parameter, and no less in bf16 than in fp32."""
    states = 16 * sum(p for p in (512 * 64 * 2, 64)) + 6 * 16 * (4 * 64 * 64 + 3 * 64 * 128 + 128)
    assert allocated(BF16) >= states
