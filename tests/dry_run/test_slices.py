"""A rank's part of a model as a config of its own has the tensors that the rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tightfit.dry_run.config import load_config
from tightfit.dry_run.slices import pipeline_slice, tensor_slice
from tightfit.errors import UnsupportedError

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "granite"]


def config_of(family: str, **fields: Any) -> PretrainedConfig:
    return load_config({"model_type": family, **SIZES, **fields})


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_shared_out_and_norms_are_not(family: str) -> None:
    whole, part = (
        shapes_of(config) for config in (config_of(family), tensor_slice(config_of(family), 2))
    )
    assert whole.keys() == part.keys()
    for name, shape in whole.items():
        changed = [(a, b) for a, b in zip(shape, part[name], strict=True) if a != b]
        if "norm" in name:
            assert not changed or family == "olmo2", name
        elif len(shape) == 2:
            assert [a for a, b in changed] == [2 * b for a, b in changed], name
            assert len(changed) == 1, name


def test_few_key_heads_are_copied() -> None:
    part = tensor_slice(config_of("llama", num_key_value_heads=1), 4)
    assert (part.num_attention_heads, part.num_key_value_heads, part.head_dim) == (1, 1, 16)


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (config_of("llama"), 3, "does not divide the model's 4 heads"),
        (config_of("llama", num_attention_heads=12, num_key_value_heads=4, hidden_size=96), 6,
         "neither is a multiple"),
        (load_config({"model_type": "gpt2"}), 2, "no tensor-parallel plan"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(
    config: PretrainedConfig, ranks: int, said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        tensor_slice(config, ranks)


def test_a_stage_has_its_layers() -> None:
    config = config_of("llama")
    assert pipeline_slice(config, 1) is config
    assert pipeline_slice(config, 4).num_hidden_layers == 2
    with pytest.raises(UnsupportedError, match="more than the model's 6 layers"):
        pipeline_slice(config, 7)
