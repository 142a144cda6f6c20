"""Finding config.json in folders, in the Hub cache and on the Hub; saying what is there instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import InputError, ModelNotFoundError
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


def test_a_config_file_stands_for_itself(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    (tmp_path / "quant_config.json").write_text("{}")
    for name in ("config.json", "other.JSON"):
        (tmp_path / name).write_text(json.dumps(TINY))
        spec = load_model_spec(str(tmp_path / name))
        assert (spec.source, spec.hidden_size, spec.assumptions) == ("file", 64, ())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(InputError, match=r"tokenizer\.json.*model_type"):
        load_model_spec(str(tmp_path / "tokenizer.json"))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    with pytest.raises(InputError, match=r"adapter_config\.json is no model\. .* base model, gpt2"):
        load_model_spec(str(tmp_path / "adapter_config.json"))


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


REFUSED = {  # name on the Hub below: status and error code as the Hub sends them, what is said
    "some/typo": (401, "RepoNotFound", "has no such model, or it is private and HF_TOKEN does"),
    "some/gated": (403, "GatedRepo", "gated: accept its licence there and set HF_TOKEN"),
    "some/adapter": (404, "EntryNotFound", "has it without config.json, as adapters and GGUF"),
    "some/disabled": (403, "DisabledRepo", "answered with an error, HTTP 403"),
    "some/trouble": (503, "", "answered with an error, HTTP 503"),
}
FETCHED = {"some/new-model": json.dumps(TINY), "some/broken": "{"}


class SmallHub(BaseHTTPRequestHandler):
    """Answers for config.json as the Hub does; hangs up on any other name."""

    def do_GET(self) -> None:
        name, _, file = self.path.strip("/").partition("/resolve/main/")
        if file != "config.json":  # huggingface_hub has questions of its own
            self.answer(404, {})
        elif name in REFUSED:
            status, code, _ = REFUSED[name]
            self.answer(status, {"X-Error-Code": code} if code else {})
        elif name in FETCHED:
            self.answer(
                200, {"X-Repo-Commit": "a" * 40, "ETag": f'"{Path(name).name}"'}, FETCHED[name]
            )

    do_HEAD = do_GET  # noqa: N815 (http.server's name)

    def answer(self, status: int, headers: dict[str, str], body: str = "") -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def small_hub() -> Iterator[str]:
    """The address of a Hub of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SmallHub) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


LOAD_ALL = """
import json, sys
from pathlib import Path
from tightfit.errors import InputError
from tightfit.facts.model_spec import load_model_spec
said = {}
for name in sys.argv[2:]:
    try:
        said[name] = load_model_spec(name, Path(sys.argv[1])).source
    except InputError as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def load_all(endpoint: str, cache: Path, *names: str, **variables: str) -> dict[str, str]:
    """The source of each name or its error, by a process whose Hub is at `endpoint`."""
    users = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    environment = {key: value for key, value in os.environ.items() if key not in users}
    own = {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "HF_HOME": str(cache.parent)}
    said = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, str(cache), *names],
        env=environment | own | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    answers: dict[str, str] = json.loads(said.stdout)
    return answers


def test_what_the_hub_answers(small_hub: str, cache: Path) -> None:
    said = load_all(small_hub, cache, *FETCHED, *REFUSED, "some/silence", "./nowhere")
    assert said.pop("some/new-model") == "hub"
    assert said["some/broken"].startswith("InputError: ")
    assert "config.json, line 1: broken JSON" in said.pop("some/broken")
    expected = {name: words for name, (_, _, words) in REFUSED.items()} | {
        "some/silence": "could not be reached (Server disconnected",
        "./nowhere": "names there are like organisation/model",
    }
    for name, words in expected.items():
        assert said[name].startswith(f"ModelNotFoundError: there is no model '{name}'.")
        assert f"  the Hub: {words}" in said[name]
        assert "http:" not in said[name]
    assert set(said) == set(expected)


def test_what_was_fetched_is_kept_and_offline_asks_nothing(small_hub: str, cache: Path) -> None:
    name = "some/new-model"
    offline = {"HF_HUB_OFFLINE": "1"}
    assert "not asked" in load_all(small_hub, cache, name, **offline)[name]
    assert load_all(small_hub, cache, name)[name] == "hub"
    assert load_all(small_hub, cache, name, **offline)[name] == "hub cache"
    repository = cache / "models--some--new-model" / "snapshots"
    assert [file.name for file in repository.glob("*/*")] == ["config.json"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied"), r"was not fetched \(Permission denied\)"),
        (TimeoutError(), r"was not fetched \(TimeoutError\)"),
    ],
)
def test_a_download_that_fails_after_the_first_answer(
    error: OSError, words: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(url: str, timeout: float) -> None:
        assert url.endswith("/some/model/resolve/main/config.json")
        assert timeout <= 5

    def fail(*_: Any, cache_dir: Path, etag_timeout: float) -> str:
        assert (cache_dir, etag_timeout <= 5) == (cache, True)
        raise error

    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelNotFoundError, match=f"the Hub: config.json {words}"):
        load_model_spec("some/model", cache)
    assert load_model_spec("Qwen/Qwen2.5-7B", cache).source == "catalogue"
