from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.taken import chequered
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tightfit.engine.apply import fit
from tightfit.errors import UnsupportedError
from tightfit.policies import (
    AdapterPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

Make = Callable[..., Any]
DORA = AdapterPolicy(rank=2, dora=True)
OPTIMIZER = OptimizerPolicy(learning_rate=1e-2, max_grad_norm=0.0)


@pytest.mark.parametrize(("precision", "loaded"), chequered(["bf16", "fp32"], [True, False]))
def test_it_is_pefts(
    make_model: Make,
    make_batch: Make,
    plain_optimizer: Make,
    tmp_path: Path,
    loaded: bool,
    precision: str,
) -> None:
    """Magnitudes, losses, gradients: also of a model whose weights come after its adapters."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = make_model(dtype)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not loaded:
        with torch.device("meta"):
            model = LlamaForCausalLM(model.config).to(dtype)
    engine = fit(
        model,
        Policies(adapter=DORA, optimizer=OPTIMIZER, precision=PrecisionPolicy(precision)),
        values=None if loaded else lambda name, tensor, part: tensor.copy_(values[name][part]),
    )
    config = LoraConfig(r=2, lora_alpha=16, target_modules="all-linear", use_dora=True)
    peft_model = get_peft_model(make_model(dtype), config)
    ours, theirs = (dict(m.named_parameters()) for m in (engine.model, peft_model))
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        if "lora_magnitude" in name:
            # peft rounds them to the base's type, so that a layer begins a little off its base.
            rough = 0.0 if precision == "fp32" else 2**-8
            torch.testing.assert_close(parameter, theirs[name], rtol=rough or 1e-6, atol=1e-6)
        if parameter.requires_grad:
            theirs[name].data.copy_(parameter.data)
    optimizer = plain_optimizer(peft_model, OPTIMIZER)
    for seed in range(3):
        ids, labels = make_batch(seed)
        expected = peft_model(input_ids=ids, labels=labels, num_items_in_batch=30).loss
        loss = engine.loss(ids, labels, 30)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        engine.backward(loss)
        for name, parameter in ours.items():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    engine.model.save_pretrained(tmp_path)
    with torch.no_grad():
        again = PeftModel.from_pretrained(make_model(dtype), tmp_path).eval()(input_ids=ids).logits
        torch.testing.assert_close(again, engine.model.eval()(input_ids=ids).logits)


def test_gpt2s_weights_are_inputs_by_outputs() -> None:
    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config)
    fit(model, Policies(adapter=DORA))
    layer = model.transformer.h[0].attn.c_attn
    norms = layer.base_layer.weight.norm(dim=0)
    torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight, norms)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"quantisation": QuantisationPolicy()}, "quantization_bit"),
        ({"sharding": ShardingPolicy(2, 3)}, r"zero_stage 3 \(take 0\)"),
        ({"sharding": ShardingPolicy(2, tensor_parallel=2)}, r"tensor_parallel_size \(take 1\)"),
        ({"placement": PlacementPolicy(parameters=Tier.HOST)}, "offload_param"),
    ],
)
def test_what_it_is_not_proved_with_is_refused(
    make_model: Make, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"use_dora needs .*{message}.*LoRA"):
        fit(make_model(), Policies(adapter=DORA, **others))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (AdapterPolicy(dora=True), "use_dora on some of the layers.*name others, such as q_proj"),
        (AdapterPolicy(dropout=0.1), "lora_dropout on some of the layers.*or leave lora_dropout"),
    ],
)
def test_experts_in_one_tensor_have_plain_lora_alone(adapter: AdapterPolicy, message: str) -> None:
    config = Qwen3MoeConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_experts=2,
        num_experts_per_tok=1, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=message):
        fit(Qwen3MoeForCausalLM(config), Policies(adapter=adapter))


def test_embeddings_have_none(make_model: Make) -> None:
    adapter = AdapterPolicy(dora=True, targets=("embed_tokens",))
    with pytest.raises(UnsupportedError, match=r"use_dora on an embedding: .*additional_target"):
        fit(make_model(tie_word_embeddings=False), Policies(adapter=adapter))
