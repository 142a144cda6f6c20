"""Reading config.json from folders, the Hub cache and the catalogue; what is refused and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.errors import InputError, ModelNotFoundError
from tightfit.facts.catalogue import find_in_catalogue
from tightfit.facts.model_spec import load_model_spec

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
OTHER = TINY | {"model_type": "some-new-family"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A Hub cache with nothing in it."""
    return tmp_path / "hub"


def write_model(folder: Path, config: dict[str, Any] | str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return str(folder)


def test_properties(tmp_path: Path) -> None:
    config = TINY | {"num_key_value_heads": 2, "max_position_embeddings": 512}
    spec = load_model_spec(write_model(tmp_path, config))
    assert spec.source == "folder"
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (64, 2, 100)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.intermediate_size, spec.tied, spec.max_positions) == (96, False, 512)
    assert spec.assumptions == ()
    counts = spec.parameter_counts()
    assert counts is not None
    assert counts.total == 2 * 6400 + 2 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 128) + 64


def test_other_words_for_the_same(tmp_path: Path) -> None:
    spec = load_model_spec(write_model(tmp_path, GPT2))
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.tied) == (64, 2, 4, True)
    with pytest.raises(InputError, match="'n_inner' is missing"):
        _ = spec.intermediate_size


def test_other_families_have_properties_but_no_closed_form(tmp_path: Path) -> None:
    spec = load_model_spec(write_model(tmp_path, OTHER))
    assert (spec.hidden_size, spec.num_layers, spec.parameter_counts()) == (64, 2, None)


def test_sizes_by_layer_are_left_to_the_model_itself(tmp_path: Path) -> None:
    config = {"model_type": "openelm", "num_key_value_heads": [3, 4], "hidden_size": 64}
    assert load_model_spec(write_model(tmp_path, config)).parameter_counts() is None


GEMMA3 = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 32},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
    },
}


def test_text_part_of_a_model_with_several(tmp_path: Path) -> None:
    spec = load_model_spec(write_model(tmp_path, GEMMA3))
    assert (spec.hidden_size, spec.num_layers, spec.parameter_counts()) == (64, 3, None)
    text = spec.text_part()
    assert text.assumptions == ("only the text part of this gemma3 model is counted",)
    assert (text.model_type, text.num_heads, text.vocab_size) == ("gemma3_text", 8, 262208)
    assert text.parameter_counts() is not None
    assert text.text_part() is text
    tied = load_model_spec(write_model(tmp_path, GEMMA3 | {"tie_word_embeddings": False}))
    assert (tied.text_part().tied, text.tied) == (False, True)


def test_a_text_part_that_does_not_say_what_it_is(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {"hidden_size": 64}}
    with pytest.raises(InputError, match="no 'model_type'"):
        load_model_spec(write_model(tmp_path, config)).text_part()


def test_tuned_variants_have_their_own_fields(cache: Path) -> None:
    assert load_model_spec("Qwen2.5-7B", cache).max_positions == 131072
    assert load_model_spec("Qwen2.5-7B-Instruct", cache).max_positions == 32768


def test_the_catalogue_says_what_it_assumes(cache: Path) -> None:
    spec = load_model_spec("Qwen/Qwen-7B-Chat", cache)
    entry = find_in_catalogue("Qwen/Qwen-7B-Chat")
    assert entry is not None
    assert (spec.name, spec.source) == ("Qwen/Qwen-7B-Chat", "catalogue")
    assert spec.assumptions == entry.assumptions != ()


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
def test_not_found_says_where_it_looked(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache.mkdir()
    with pytest.raises(ModelNotFoundError) as caught:
        load_model_spec(name, cache)
    message = str(caught.value)
    assert repr(name) in message
    assert str(cache) in message
    assert "catalogue" in message
    asked = "not asked, because HF_HUB_OFFLINE is set"
    refused = "names there are like organisation/model"
    # "./nowhere" has one slash like a name on the Hub, and is told apart only when it is asked for.
    assert f"  the Hub: {asked if name.count('/') == 1 else refused}\n" in message
    assert ("nearest: Qwen/Qwen2.5" in message) == name.startswith("Qwen")


def test_an_empty_name_is_not_the_working_folder(cache: Path) -> None:
    with pytest.raises(InputError, match="name is empty"):
        load_model_spec(" ", cache)
