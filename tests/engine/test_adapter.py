from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tightfit.dry_run.fakes import fake_tensors, make_fake
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.apply import fit
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.quantisation import QuantisedLinear, apply_quantisation
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import AdapterPolicy, CheckpointingPolicy, Policies, QuantisationPolicy

Make = Callable[..., Any]


def trained_modules(model: Any) -> set[str]:
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in names)
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names}


def test_no_policy_leaves_the_model_alone(make_model: Make) -> None:
    model = make_model()
    assert apply_adapter(model, None) is model


def test_all_linear_layers_but_the_head_by_default(make_model: Make) -> None:
    model = apply_adapter(make_model(), AdapterPolicy(rank=2))
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert trained_modules(model) == attention | {"gate_proj", "up_proj", "down_proj"}


def test_targets_by_name(make_model: Make) -> None:
    model = apply_adapter(make_model(), AdapterPolicy(targets=("q_proj", "v_proj")))
    assert trained_modules(model) == {"q_proj", "v_proj"}


def test_a_wrong_target_is_told_the_names_there_are(make_model: Make) -> None:
    message = (
        "lora_target qproj: no such module in the model; its linear layers are "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )
    with pytest.raises(ConfigError) as caught:
        fit(make_model(), Policies(adapter=AdapterPolicy(targets=("q_proj", "qproj"))))
    assert str(caught.value) == message


def test_gpt2_has_linear_layers_of_its_own_kind() -> None:
    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    with pytest.raises(ConfigError, match="linear layers are c_attn, c_fc, c_proj, lm_head"):
        apply_adapter(GPT2LMHeadModel(config), AdapterPolicy(targets=("q_proj",)))
    model = apply_adapter(GPT2LMHeadModel(config), AdapterPolicy())
    assert trained_modules(model) == {"c_attn", "c_fc", "c_proj"}


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank_and_load_in_peft(
    make_model: Make, make_batch: Callable[..., Any], tmp_path: Path
) -> None:
    adapted = apply_adapter(make_model(), AdapterPolicy(rank=4, alpha=6.0, rslora=True)).eval()
    plain = apply_adapter(make_model(), AdapterPolicy(rank=4, alpha=12.0)).eval()
    for model in (adapted, plain):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.constant_(parameter, 0.1)
    adapted.save_pretrained(tmp_path)
    ids, _ = make_batch(0)
    logits = adapted(input_ids=ids).logits
    assert torch.equal(logits, plain(input_ids=ids).logits)  # 6 / sqrt(4) = 12 / 4
    loaded = PeftModel.from_pretrained(make_model(), tmp_path)
    assert torch.equal(loaded(input_ids=ids).logits, logits)


def test_a_quantised_base_is_adapted_by_the_same_names(make_model: Make) -> None:
    for policy in (AdapterPolicy(), AdapterPolicy(targets=("q_proj", "down_proj"))):
        plain, quantised = make_model(), make_model()
        apply_quantisation(quantised, QuantisationPolicy())
        adapted = apply_adapter(quantised, policy)
        assert trained_modules(adapted) == trained_modules(apply_adapter(plain, policy))


def test_a_wrong_target_of_a_quantised_base_is_told_the_same_names(make_model: Make) -> None:
    model = make_model()
    apply_quantisation(model, QuantisationPolicy())
    with pytest.raises(ConfigError, match="its linear layers are down_proj, gate_proj, k_proj"):
        apply_adapter(model, AdapterPolicy(targets=("qproj",)))


def test_adapters_of_a_quantised_base_are_saved_in_pefts_layout(
    make_model: Make, make_batch: Callable[..., Any], tmp_path: Path
) -> None:
    """Loaded onto a base of the dequantised weights, they compute the same bits."""
    quantised, plain = make_model(), make_model()
    apply_quantisation(quantised, QuantisationPolicy())
    with torch.no_grad():
        for name, layer in quantised.named_modules():
            if isinstance(layer, QuantisedLinear):
                plain.get_submodule(name).weight.copy_(layer.dequantised(torch.float32))
    adapted = apply_adapter(quantised, AdapterPolicy(rank=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    ids, _ = make_batch(0)
    assert torch.equal(loaded(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits)


def test_bitsandbytes_does_not_warn_of_what_adapters_do_not_need() -> None:
    """On some processors it says at import that kernels for inference are missing."""
    import_library()
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


def test_a_layer_draws_the_same_adapter_whichever_others_there_are(make_model: Make) -> None:
    """A pipeline stage has some of the layers, and begins as one process does."""

    def drawn(seed: int, layers: int) -> dict[str, torch.Tensor]:
        model = make_model(num_hidden_layers=layers)
        torch.manual_seed(seed)
        adapted = apply_adapter(model, AdapterPolicy(rank=2))
        return {name: p for name, p in adapted.named_parameters() if "lora_A" in name}

    few, more, other = drawn(1, 1), drawn(1, 3), drawn(2, 1)
    assert all(torch.equal(value, more[name]) for name, value in few.items())
    assert not any(torch.equal(value, other[name]) for name, value in few.items())
    values = list(more.values())
    assert not any(torch.equal(values[0], v) for v in values[1:] if v.shape == values[0].shape)
    assert all(0 < value.std() < 1 for value in values)


def test_drawing_adapters_changes_no_other_draw(make_model: Make) -> None:
    """Beyond what peft draws: a dry run, whose tensors are fake, leaves the random state alone."""
    model = make_model()
    before = torch.get_rng_state()
    with fake_tensors():
        make_fake(model)
        apply_adapter(model, AdapterPolicy(rank=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_experts_kept_together_are_adapted_too() -> None:
    """peft finds them under names of its own, and warns of them for nothing."""
    config = Qwen3MoeConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = apply_adapter(Qwen3MoeForCausalLM(config), AdapterPolicy(rank=2))
    assert {"q_proj", "gate", "experts", "base_layer"} <= trained_modules(model)


def test_a_model_without_checkpointing_says_so(make_model: Make) -> None:
    model = make_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(UnsupportedError, match="gradient_checkpointing: false"):
        apply_checkpointing(model, CheckpointingPolicy(True))
    apply_checkpointing(model, CheckpointingPolicy(False))
