from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from tightfit.bill.decoder import LayerShape, LinearShape, decoder_tensors
from tightfit.bill.shards import ModelTensors
from tightfit.policies import AdapterPolicy, Policies, QuantisationPolicy

FULL = Policies()
LORA = Policies(adapter=AdapterPolicy(rank=4))
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MLP = (LinearShape(40, 32), LinearShape(40, 32), LinearShape(32, 40))
ATTENTION = (
    LinearShape(32, 32),
    LinearShape(16, 32),
    LinearShape(16, 32),
    LinearShape(32, 32),
)
QWEN2 = LayerShape(ATTENTION + MLP, vectors=(32, 32, 32, 16, 16))
# Queries and keys have norms over a head of 8; experts are stacked, the router is a parameter.
QWEN3_MOE = LayerShape(ATTENTION, ((4, 48, 32), (4, 32, 24), (1, 4, 32)), (32, 32, 8, 8))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policies", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (Qwen2Config(**SIZES), QWEN2),
        (
            Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, moe_intermediate_size=24),
            QWEN3_MOE,
        ),
    ],
    ids=["qwen2", "qwen3-moe"],
)
def test_counts_are_those_of_the_model(
    config: PretrainedConfig, layer: LayerShape, policies: Policies, tied: bool
) -> None:
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if policies.adapter is not None:
            names = ["q_proj", "k_proj", "v_proj", "o_proj"]
            names += ["gate_proj", "up_proj", "down_proj"] if layer is QWEN2 else []
            model = get_peft_model(model, LoraConfig(r=4, target_modules=names))
    parameters = list(model.parameters())
    found = decoder_tensors([layer] * 2, 32, 96, policies, tied=tied)
    assert found.count(trainable=True) == sum(p.numel() for p in parameters if p.requires_grad)
    assert found.count(trainable=False) == sum(p.numel() for p in parameters if not p.requires_grad)
    assert found.tied == tied


def test_qwen2_5_7b() -> None:
    """7,615,616,512 parameters, as its model card says: 7.61B."""
    hidden, kv, inner = 3584, 512, 18944
    linears = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    linears += [(inner, hidden), (inner, hidden), (hidden, inner)]
    layer = LayerShape(
        tuple(LinearShape(*each) for each in linears), vectors=(hidden, hidden, hidden, kv, kv)
    )
    assert decoder_tensors([layer] * 28, hidden, 152064, FULL).count(trainable=True) == 7615616512


def test_a_few_bit_base_packs_linear_maps_only() -> None:
    policies = replace(LORA, quantisation=QuantisationPolicy())
    model = decoder_tensors([QWEN3_MOE], 32, 96, policies)
    assert model.count(trainable=False, quantised=True) == 32 * (32 + 16 + 16 + 32)
    assert model.count(trainable=True) == 4 * (64 + 48 + 48 + 64)


def test_only_named_maps_get_adapters() -> None:
    layer = LayerShape((LinearShape(8, 4), LinearShape(16, 4, adapted=False)))
    assert trainable(decoder_tensors([layer] * 3, 4, 10, LORA)) == 3 * 4 * (8 + 4)
    assert trainable(decoder_tensors([layer] * 3, 4, 10, LORA, dora=True)) == 3 * (4 * 12 + 8)


def trainable(model: ModelTensors) -> int:
    return model.count(trainable=True)
