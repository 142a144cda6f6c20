"""The closed forms beside what the engine really holds, wherever a placement puts it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tightfit.bill.model_states import tensor_state_bytes
from tightfit.bill.on_disk import record_bytes
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.engine.disk_records import _lay_out
from tightfit.engine.engine import Engine
from tightfit.engine.supported import engine_lacks
from tightfit.errors import UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    Master,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
CONFIG: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
PLACEMENTS = {
    "device": PlacementPolicy(),
    "host": PlacementPolicy(HOST, HOST),
    "late": PlacementPolicy(DEVICE, HOST),
    "some states": PlacementPolicy(HOST, HOST, optimizer_fraction=0.3),
    "all on host": PlacementPolicy(HOST, HOST, HOST),
    "some parameters": PlacementPolicy(HOST, HOST, HOST, parameter_fraction=0.5, prefetch=2),
    "frozen on host": PlacementPolicy(parameters=HOST),
    "nvme": PlacementPolicy(HOST, NVME),
    "nvme late": PlacementPolicy(DEVICE, NVME, optimizer_fraction=0.5),
    "gradients on nvme": PlacementPolicy(NVME, NVME),
    "parameters on host": PlacementPolicy(NVME, NVME, HOST, prefetch=0),
    "all on nvme": PlacementPolicy(NVME, NVME, NVME),
    "parameters on nvme": PlacementPolicy(HOST, HOST, NVME, lazy_step=True),
}
OPTIMIZERS = list(OptimizerName)
KEPT = (Kind.PARAMETERS, Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES, Kind.GRADIENTS)
BF16 = PrecisionPolicy("bf16")
DORA = AdapterPolicy(rank=2, dora=True)
WHOLE = AdapterPolicy(rank=2, modules_to_save=("embed_tokens", "lm_head", "norm"))


def possible(**choices: Any) -> Policies | None:
    """Policies of these choices, if they go together."""
    try:
        return Policies(**choices)
    except UnsupportedError:
        return None


# Every optimizer on every placement; precisions, adapters and split masters take turns.
CASES = [
    (name, policies)
    for number, (name, optimizer) in enumerate(product(PLACEMENTS, OPTIMIZERS))
    for precision, adapter, master in [
        (BF16, None, (Master.SPLIT, Master.SPLIT_8)[number % 2]),
        (
            (BF16, PrecisionPolicy())[number % 2],
            (None, AdapterPolicy(rank=2), None, WHOLE, None, DORA)[number // 2 % 6],
            Master.FP32,
        ),
    ]
    for policies in [
        possible(
            optimizer=OptimizerPolicy(optimizer, master=master),
            placement=PLACEMENTS[name],
            precision=precision,
            adapter=adapter,
        )
    ]
    if policies is not None and not any(engine_lacks(policies))
    # DoRA's weights do not leave.
    if policies.adapter != DORA or policies.placement.parameters is DEVICE
]


def tensors_of(engine: Engine, *, tied: bool) -> ModelTensors:
    """Shapes of a real model's parameters."""
    return ModelTensors.grouped(
        (
            (name, Tensor(tuple(parameter.shape), trainable=parameter.requires_grad))
            for name, parameter in engine.model.named_parameters()
        ),
        tied=tied,
    )


def make_model(policies: Policies, *, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=tied))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[policies.precision.parameters]
    return model.to(dtype)


@pytest.mark.parametrize(("name", "policies"), CASES)
def test_the_engine_holds_what_the_closed_form_says(
    name: str, policies: Policies, tmp_path: Path
) -> None:
    tied = policies.optimizer.name is OptimizerName.LION
    model = make_model(policies, tied=tied)
    with Ledger() as counting:
        counting.adopt(model, None if policies.placement.parameters is DEVICE else HOST)
        engine = fit(model, policies, device=torch.device("cpu"), offload_folder=tmp_path)
        closed = tensor_state_bytes(tensors_of(engine, tied=tied), policies)
        found = {tier: counting.kinds(tier) for tier in Tier}
        fetched = 0

        def see_fetched(*unused: Any) -> None:
            nonlocal fetched
            fetched = max(fetched, counting.kinds(DEVICE).get(Kind.PARAMETERS, 0))

        for module in engine.model.modules():
            module.register_forward_hook(see_fetched)
        ids = torch.ones(1, 4, dtype=torch.long)
        engine.backward(engine.loss(ids, ids, 3))
        engine.optimizer.drain()
        gradients = counting.kinds(DEVICE).get(Kind.GRADIENTS, 0)
    for tier in Tier:
        expected = {kind: closed.get(tier, {}).get(kind, 0) for kind in KEPT}
        here = {kind: found[tier].get(kind, 0) for kind in KEPT}
        if tier is DEVICE:
            assert here[Kind.PARAMETERS] <= fetched <= expected[Kind.PARAMETERS]
            assert gradients == expected[Kind.GRADIENTS]
            visits = policies.placement.parameters is not DEVICE
            for kinds in (expected, here):
                kinds.pop(Kind.GRADIENTS)
                if visits:
                    kinds.pop(Kind.PARAMETERS)
        for kinds in (expected, here):  # what a split master has is a state to the engine
            kinds[Kind.OPTIMIZER_STATES] += kinds.pop(Kind.MASTER_WEIGHTS)
        assert here == expected, tier


@pytest.mark.parametrize("values", [1, 4095, 4096, 2**21, 2**21 + 1, 5_000_000])
def test_records_are_cut_as_the_engine_cuts_them(values: int) -> None:
    parameter = torch.nn.Parameter(torch.empty(values, device="meta"))
    entries = {
        "master": (values, torch.float32),
        "exp_avg": (values, torch.uint8),
        "exp_avg_scales": (-(-values // 256), torch.float32),
    }
    _, kinds = _lay_out({parameter: entries})
    assert record_bytes(values, (4, 1), scales=1) == sum(kinds.values())
