"""A model as a row of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM, PreTrainedModel

from tightfit.engine.adapter import apply_adapter
from tightfit.engine.units import Unit, units_of
from tightfit.policies import AdapterPolicy

Make = Callable[..., LlamaForCausalLM]


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def test_a_decoder_in_the_order_of_forward(make_model: Make) -> None:
    model = make_model(tie_word_embeddings=False)
    units = units_of(model, model, gathered=False)
    assert names(units) == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    ]  # fmt: skip
    assert [unit.is_layer for unit in units] == [False, True, True, False, False]


def test_a_tied_embedding_is_one_unit_that_two_modules_use(make_model: Make) -> None:
    model = make_model()
    units = units_of(model, model, gathered=False)
    assert names(units)[0] == "model.embed_tokens"
    assert units[0].modules == (model.model.embed_tokens, model.lm_head)
    assert "lm_head" not in names(units)


def test_what_is_gathered_at_the_root_is_one_unit_of_the_root(make_model: Make) -> None:
    model = make_model()
    units = units_of(model, model, gathered=True)
    assert names(units) == ["", "model.layers.0", "model.layers.1"]
    assert units[0].modules == (model,)
    assert set(units[0].parameters) == {model.lm_head.weight, model.model.norm.weight}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora"])
def test_every_parameter_is_in_exactly_one_unit(
    make_model: Make, kind: str, gathered: bool
) -> None:
    model: PreTrainedModel = make_model()
    if kind == "gpt2":  # has embeddings of positions too
        config = GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=3, n_head=4)
        model = AutoModelForCausalLM.from_config(config)
    root = apply_adapter(model, AdapterPolicy() if kind == "lora" else None)
    units = units_of(root, model, gathered=gathered)
    of_units = [parameter for unit in units for parameter in unit.parameters]
    assert len(of_units) == len(set(of_units))
    assert set(of_units) == set(root.parameters())


def test_who_has_work_to_finish_is_asked_before_each_forward_and_before_other_hooks(
    make_model: Make, make_batch: Callable[..., Any]
) -> None:
    model = make_model()
    units = units_of(model, model, gathered=False)
    seen: list[str] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append("older hook"))
    for unit in units:
        unit.before_use += [lambda name=unit.name: seen.append(name), lambda: seen.append("second")]
        unit.watch()
    with torch.no_grad():
        model(input_ids=make_batch(0)[0])
    first_layer = seen.index("model.layers.0")
    assert seen[first_layer : first_layer + 3] == ["model.layers.0", "second", "older hook"]
    assert [name for name in seen if "." in name] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
        "model.embed_tokens",  # the output layer uses it
    ]  # fmt: skip
