"""Nothing of an engine that nobody has any more is left, wherever its plan had put things."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    Tier,
)

HOST = PlacementPolicy(gradients=Tier.HOST, optimizer_states=Tier.HOST)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing, chunked loss": {
        "checkpointing": CheckpointingPolicy(True), "loss": LossPolicy(LossKind.CHUNKED),
    },
    "sliced loss": {"loss": LossPolicy(LossKind.SLICED)},
    "lora": {"adapter": AdapterPolicy(rank=2)},
    "host": {"placement": HOST},
    "lazy": {"placement": replace(HOST, lazy_step=True)},
    "late gradients": {"placement": replace(HOST, gradients=Tier.DEVICE)},
    "streams": {"placement": replace(HOST, parameters=Tier.HOST)},
    "streams, sliced loss": {
        "placement": replace(HOST, parameters=Tier.HOST), "loss": LossPolicy(LossKind.SLICED),
    },
    "activations": {"placement": PlacementPolicy(activations=Tier.HOST)},
    "nvme": {
        "placement": PlacementPolicy(
            gradients=Tier.NVME, optimizer_states=Tier.NVME, parameters=Tier.NVME, lazy_step=True
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_dropped_is_gone(name: str, tmp_path: Path) -> None:
    import_library()  # has tensors of its own
    with Ledger(torch.device("cpu")) as ledger:
        alive = trained(Policies(**CASES[name]), tmp_path)
        gc.collect()
        assert [type(ref()) for ref in alive if ref() is not None] == []
        left = {tier: ledger.total_bytes(tier) for tier in Tier}
    assert left == dict.fromkeys(Tier, 0)


def trained(policies: Policies, folder: Path) -> list[weakref.ref[Any]]:
    """What there was after two steps."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    engine = fit(LlamaForCausalLM(config), policies, offload_folder=folder)
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        engine.backward(engine.loss(ids, ids, 8))
        engine.step()
    engine.evaluation_loss(ids, ids)
    engine.drain()
    held = [engine, engine.model, engine.optimizer, *engine.model.parameters()]
    return [weakref.ref(each) for each in held]
