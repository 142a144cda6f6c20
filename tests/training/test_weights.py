"""Weights are those that transformers loads, whatever the files call them and in whatever parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tightfit.engine.regions import Region, whole
from tightfit.errors import InputError, ModelNotFoundError
from tightfit.training.weights import CheckpointWeights

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "phi3": {"pad_token_id": 0},
    "gemma3_text": {"sliding_window": 8},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a small model as transformers saves it."""
    model_type = request.param.split()[0]
    sizes = SIZES | MODELS[request.param]
    if model_type in ("gpt2", "deepseek_v3"):
        sizes.pop("head_dim")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    for buffer in model.buffers():
        if buffer.is_floating_point() and not buffer.any():
            buffer.uniform_()  # DeepSeek's, which are saved and begin with 0
    model.save_pretrained(tmp_path)
    return tmp_path


def on_meta(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype
        )
    return model


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters once, and the buffers that are saved."""
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: t for name, t in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_that_transformers_loads(saved: Path, dtype: torch.dtype) -> None:
    expected = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    empty = on_meta(saved, dtype)
    weights = CheckpointWeights(saved, empty)
    for name, value in saved_tensors(expected).items():
        filled = torch.full_like(value, torch.nan)
        weights(name, filled, whole(value))
        assert torch.equal(filled, value), name


def test_regions_are_parts_of_them(saved: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(saved)
    weights = CheckpointWeights(saved, on_meta(saved))
    for name, value in saved_tensors(expected).items():
        region: Region = tuple(slice(size // 3, size) for size in value.shape)
        filled = torch.full_like(value[region], torch.nan)
        weights(name, filled, region)
        assert torch.equal(filled, value[region]), name


def test_several_files_and_an_index(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = CheckpointWeights(tmp_path, on_meta(tmp_path))
    for name, value in model.named_parameters():
        filled = torch.empty_like(value)
        weights(name, filled.data, whole(value))
        assert torch.equal(filled, value)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    sizes = SIZES | {"tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("has", ["the other", "both"])
def test_tied_weights_by_any_of_their_names(tied: Path, has: str) -> None:
    tensors = load_file(tied / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    if has == "the other":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    filled = torch.empty_like(embedding)
    CheckpointWeights(tied, on_meta(tied))("model.embed_tokens.weight", filled, whole(filled))
    assert torch.equal(filled, embedding)


def test_tied_weights_that_differ(tied: Path) -> None:
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight"):
        CheckpointWeights(tied, on_meta(tied))


def test_an_index_without_its_files(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(InputError, match="which is not there"):
        CheckpointWeights(tmp_path, on_meta(tmp_path))
    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(InputError, match="is broken"):
        CheckpointWeights(tmp_path, on_meta(tmp_path))
    index.unlink()
    with pytest.raises(ModelNotFoundError, match="neither"):
        CheckpointWeights(tmp_path, on_meta(tmp_path))
