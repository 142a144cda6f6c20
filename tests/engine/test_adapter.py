from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tightfit.engine.adapter import apply_adapter
from tightfit.engine.apply import fit
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import AdapterPolicy, CheckpointingPolicy, Policies

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


def test_a_model_without_checkpointing_says_so(make_model: Make) -> None:
    model = make_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(UnsupportedError, match="gradient_checkpointing: false"):
        apply_checkpointing(model, CheckpointingPolicy(True))
    apply_checkpointing(model, CheckpointingPolicy(False))
