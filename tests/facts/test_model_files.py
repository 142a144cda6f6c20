"""Finding config.json in folders and in the Hub cache, and saying what is there instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import InputError
from tightfit.facts.model_spec import load_model_spec

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"config\.json, line 1: broken JSON"),
        ("[1]", "must hold a JSON object, not a list"),
        ("[" * 100_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_model_spec(write_model(tmp_path, config))
    assert str(tmp_path / "config.json") in str(caught.value)


SOMETHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(["full_attention", "", "4", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=100)
@given(st.dictionaries(st.text(max_size=8), SOMETHING) | SOMETHING)
def test_any_json_is_a_spec_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, content: Any
) -> None:
    folder = write_model(tmp_path_factory.mktemp("fuzzed"), json.dumps(content))
    try:
        spec = load_model_spec(folder)
    except InputError as error:
        spec, refused = None, str(error)
    assert spec is not None or folder in refused


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
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


def test_a_folder_with_a_config_but_packed_weights_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY)
    (tmp_path / "model-Q4.gguf").touch()
    (said,) = load_model_spec(folder).assumptions
    assert said == "the only weights here are packed (model-Q4.gguf); they count as unpacked"
    (tmp_path / "model.safetensors").touch()
    assert load_model_spec(folder).assumptions == ()


@pytest.mark.parametrize(
    ("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")]
)
def test_a_folder_with_quantised_weights(tmp_path: Path, file: str, method: str) -> None:
    folder = write_model(tmp_path, TINY)
    (tmp_path / file).write_text("{}")
    with pytest.raises(InputError, match=rf"already quantised \({method}\)"):
        load_model_spec(folder)


@pytest.mark.parametrize("has_config", [True, False])
def test_a_folder_with_an_adapter(tmp_path: Path, has_config: bool) -> None:
    if has_config:
        write_model(tmp_path, TINY)
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    with pytest.raises(InputError, match="holds an adapter; name its base model, Qwen/Qwen3-8B"):
        load_model_spec(str(tmp_path))
    adapter.write_text("{}")
    with pytest.raises(InputError, match=r"name its base model\."):
        load_model_spec(str(tmp_path))


def put_into(cache: Path, name: str) -> Path:
    """A repository's folder in a Hub cache, with nothing in its one snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


def test_hub_cache_comes_before_the_catalogue(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(put_into(cache, "Qwen/Qwen2.5-7B"), TINY)
    spec = load_model_spec("Qwen/Qwen2.5-7B", cache)
    assert (spec.source, spec.hidden_size) == ("hub cache", 64)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    assert load_model_spec("Qwen/Qwen2.5-7B").source == "hub cache"


def test_an_adapter_in_the_hub_cache(cache: Path) -> None:
    adapter = put_into(cache, "somebody/tuned") / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "gpt2"}')
    with pytest.raises(
        InputError, match=r"somebody/tuned is no model\. It holds an .* model, gpt2"
    ):
        load_model_spec("somebody/tuned", cache)
