"""Reading config.json from folders, the Hub cache and the catalogue; the closed-form count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.errors import InputError, ModelNotFoundError
from tightfit.facts.catalogue import catalogue_names
from tightfit.facts.model_spec import ModelSpec, load_model_spec

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}

PUBLIC_TOTALS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A Hub cache with nothing in it."""
    return tmp_path / "hub"


def write_model(folder: Path, config: dict[str, Any] | str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return str(folder)


def meta_parameters(config: dict[str, Any]) -> int:
    """Parameters of the transformers model, built without memory; a tied one counts once."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields)
        )
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "total"), PUBLIC_TOTALS.items())
def test_counts_are_the_public_totals(name: str, total: int, cache: Path) -> None:
    assert load_model_spec(name, cache).parameter_count() == total


def test_every_original_of_the_catalogue_has_its_public_total_here() -> None:
    entries = json.loads(
        Path(__file__).parents[2].joinpath("src/tightfit/facts/catalogue.json").read_text()
    )
    assert {entry["name"] for entry in entries} == set(PUBLIC_TOTALS)


@pytest.mark.parametrize("name", catalogue_names())
def test_catalogue_agrees_with_transformers(name: str, cache: Path) -> None:
    config = load_model_spec(name, cache).config | {"num_hidden_layers": 2}
    spec = ModelSpec(name, "catalogue", config)
    assert spec.parameter_count() == meta_parameters(config)


@pytest.mark.parametrize(
    "differences",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": None},
        {"head_dim": 24},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"model_type": "mistral", "num_attention_heads": 8},
        {"model_type": "qwen2", "num_key_value_heads": 2},
        {"model_type": "qwen2", "num_key_value_heads": None},
        {"model_type": "qwen3", "num_key_value_heads": 1},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    ],
)
def test_closed_form_agrees_with_transformers(tmp_path: Path, differences: dict[str, Any]) -> None:
    config = TINY | differences
    spec = load_model_spec(write_model(tmp_path, config))
    assert spec.parameter_count() == meta_parameters(config)


def test_properties(tmp_path: Path) -> None:
    config = TINY | {"num_key_value_heads": 2, "max_position_embeddings": 512}
    spec = load_model_spec(write_model(tmp_path, config))
    assert spec.source == "folder"
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (64, 2, 100)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.intermediate_size, spec.tied, spec.max_positions) == (96, False, 512)


def test_other_families_have_properties_but_no_closed_form(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    spec = load_model_spec(write_model(tmp_path, gpt2))
    assert spec.parameter_count() is None
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.tied) == (64, 2, 4, True)
    with pytest.raises(InputError, match="no 'intermediate_size'"):
        _ = spec.intermediate_size


def test_text_part_of_a_model_with_several(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 64, "num_hidden_layers": 3}}
    spec = load_model_spec(write_model(tmp_path, config))
    assert (spec.hidden_size, spec.num_layers, spec.parameter_count()) == (64, 3, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"config\.json, line 1: broken JSON"),
        ("[1]", "must hold a JSON object, not a list"),
        ({}, "no 'model_type'"),
        (TINY | {"hidden_size": None}, "'hidden_size' is missing"),
        ({k: v for k, v in TINY.items() if k != "intermediate_size"}, "'intermediate_size' is mis"),
        (TINY | {"num_hidden_layers": -2}, "'num_hidden_layers' must be .* above 0, not -2"),
        (TINY | {"vocab_size": "100"}, "'vocab_size' must be a whole number above 0, not '100'"),
        (TINY | {"vocab_size": True}, "not True"),
        (TINY | {"num_attention_heads": 5}, "'hidden_size' 64 is not a multiple of .* 5"),
        (TINY | {"num_key_value_heads": 3}, "'num_attention_heads' 4 is not a multiple of .* 3"),
        (TINY | {"quantization_config": {"quant_method": "awq"}}, r"already quantised \(awq\)"),
        ({"model_type": "gpt2", "n_layer": 0}, "'num_hidden_layers' must be"),
    ],
)
def test_broken_configs(tmp_path: Path, config: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_model_spec(write_model(tmp_path, config))
    assert "config.json" in str(caught.value)
    assert caught.value.exit_code == 2


def test_sizes_by_layer_are_left_to_the_model_itself(tmp_path: Path) -> None:
    config = {"model_type": "openelm", "num_key_value_heads": [3, 4], "hidden_size": 64}
    assert load_model_spec(write_model(tmp_path, config)).parameter_count() is None


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model_spec(str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(InputError, match="adapter; name its base model"):
        load_model_spec(str(tmp_path))
    packed = tmp_path / "model.gguf"
    packed.touch()
    for path in (tmp_path, packed):
        with pytest.raises(InputError, match=r"model\.gguf is a GGUF file"):
            load_model_spec(str(path))
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(InputError, match="is a file; name the folder"):
        load_model_spec(str(weights))


@pytest.mark.parametrize("name", ["qwen/qwen2.5-7b", "QWEN2.5-7B", "Qwen/Qwen2.5-7B"])
def test_catalogue_ignores_case_and_owner(name: str, cache: Path) -> None:
    spec = load_model_spec(name, cache)
    assert (spec.name, spec.source) == ("Qwen/Qwen2.5-7B", "catalogue")


def test_tuned_variants_have_their_own_fields(cache: Path) -> None:
    assert load_model_spec("Qwen2.5-7B", cache).max_positions == 131072
    assert load_model_spec("Qwen2.5-7B-Instruct", cache).max_positions == 32768


def test_hub_cache_comes_before_the_catalogue(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = cache / "models--Qwen--Qwen2.5-7B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    write_model(repository / "snapshots" / "abc", TINY)
    spec = load_model_spec("Qwen/Qwen2.5-7B", cache)
    assert (spec.source, spec.hidden_size) == ("hub cache", 64)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    assert load_model_spec("Qwen/Qwen2.5-7B").source == "hub cache"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-8B",
        "no/such/model",
        "./nowhere",
        "~no-such-user/model",
        "q" * 5000,
        "a\0b",
    ],
)
def test_not_found_says_where_it_looked(name: str, cache: Path) -> None:
    cache.mkdir()
    with pytest.raises(ModelNotFoundError) as caught:
        load_model_spec(name, cache)
    message = str(caught.value)
    assert repr(name) in message
    assert str(cache) in message
    assert "catalogue" in message
    assert ("nearest: Qwen/Qwen2.5" in message) == name.startswith("Qwen")


def test_an_empty_name_is_not_the_working_folder(cache: Path) -> None:
    with pytest.raises(InputError, match="name is empty"):
        load_model_spec(" ", cache)
