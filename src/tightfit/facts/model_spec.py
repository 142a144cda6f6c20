"""The shape of a model, read from its config.json without loading torch, transformers or weights.

A name is looked for as a local folder, then in the Hub cache on this machine, then in the built-in
catalogue. Nothing is downloaded. Knows nothing about precision, sharding or memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.errors import InputError, ModelNotFoundError
from tightfit.facts.catalogue import catalogue_names, find_in_catalogue, nearest_names

Source = Literal["folder", "hub cache", "catalogue"]

# Families whose parameters have a closed form: a decoder of attention and a gated MLP with RMS
# norms. The values are what transformers takes where config.json leaves a key out.
_DENSE_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}

# Other architectures' words for the same things.
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
}

_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelSpec:
    """A model's config.json and where it was found.

    Attributes:
        name: the Hub name, or the folder as the user wrote it.
        config: the content of config.json, unchanged.
    """

    name: str
    source: Source
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers."""
        return str(self.config["model_type"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._required("hidden_size")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self._required("num_hidden_layers")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._required("vocab_size")

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._required("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; as many as query heads unless attention is grouped."""
        return self._number("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self._number("head_dim") or self.hidden_size // self.num_heads

    @property
    def intermediate_size(self) -> int:
        """Width inside the MLP."""
        return self._required("intermediate_size")

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding itself."""
        default = self.model_type not in _DENSE_FAMILIES
        return bool(self._value("tie_word_embeddings", default))

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was made for; None when config.json does not say."""
        return self._number("max_position_embeddings")

    def parameter_count(self) -> int | None:
        """Parameters of the causal language model, a tied embedding counted once.

        None for families without a closed form; their parameters are counted by building them.
        """
        if self.model_type not in _DENSE_FAMILIES:
            return None
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        norms = 2 * self.hidden_size
        layer = self._attention_parameters() + self._mlp_parameters() + norms
        return embeddings + self.num_layers * layer + self.hidden_size

    def _attention_parameters(self) -> int:
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = self.hidden_size * (2 * query + 2 * key_value)
        biases = 0
        if self.model_type == "qwen2":
            biases = query + 2 * key_value
        elif self.model_type in ("llama", "qwen3") and self._value("attention_bias", False):
            biases = query + 2 * key_value + self.hidden_size
        norms = 2 * self.head_dim if self.model_type == "qwen3" else 0
        return weights + biases + norms

    def _mlp_parameters(self) -> int:
        weights = 3 * self.hidden_size * self.intermediate_size
        has_bias = self.model_type == "llama" and self._value("mlp_bias", False)
        return weights + (2 * self.intermediate_size + self.hidden_size if has_bias else 0)

    def _value(self, key: str, default: Any = None) -> Any:
        return _lookup(self.config, key, default)

    def _number(self, key: str) -> int | None:
        value = self._value(key)
        return None if value is None else int(value)

    def _required(self, key: str) -> int:
        value = self._number(key)
        if value is None:
            raise InputError(
                f"config.json of {self.name} has no {key!r} (model_type {self.model_type!r})"
            )
        return value


def load_model_spec(name_or_path: str, hub_cache: Path | None = None) -> ModelSpec:
    """The spec of a model folder, or of a Hub name in the local cache or the catalogue.

    Args:
        hub_cache: the folder of the Hub cache; by default where HF_HOME puts it.

    Raises:
        ModelNotFoundError: there is no such model; the message lists where it was looked for.
        InputError: config.json is broken or contradicts itself, or the weights are quantised.
    """
    if not name_or_path.strip():
        raise InputError("the model's name is empty; give a folder or a name on the Hub")
    path = _local_path(name_or_path)
    hub_cache = hub_cache or _default_hub_cache()
    if _exists(path):
        return _checked(ModelSpec(name_or_path, "folder", _read_folder(path)), path)
    cached = _cached_config(name_or_path, hub_cache)
    if cached is not None:
        return _checked(ModelSpec(name_or_path, "hub cache", _read_json(cached)), cached)
    known = find_in_catalogue(name_or_path)
    if known is None:
        raise ModelNotFoundError(_not_found(name_or_path, path, hub_cache))
    return ModelSpec(known[0], "catalogue", known[1])


def _lookup(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """A key or its synonym, at the top or in the text part of a model with several parts; then
    what transformers takes for the family."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, dict) else {}):
        for name in (key, *_SYNONYMS.get(key, ())):
            if level.get(name) is not None:
                return level[name]
    if key in config:  # an explicit null: "as many as heads", not the family's default
        return default
    return _DENSE_FAMILIES.get(str(config.get("model_type")), {}).get(key, default)


def _local_path(name: str) -> Path:
    """The name as a path, `~` expanded where it is a home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _exists(path: Path) -> bool:
    """Whether there is something at the path; a name that cannot be a path names nothing."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _default_hub_cache() -> Path:
    """Where huggingface_hub keeps downloads, by the same environment variables."""
    home = os.environ.get("HF_HOME") or os.path.join(  # noqa: PTH118 (a user's variable, as text)
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or f"{home}/hub").expanduser()


def _cached_config(name: str, hub_cache: Path) -> Path | None:
    if not hub_cache.is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=hub_cache)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _read_folder(path: Path) -> dict[str, Any]:
    """config.json of a model folder; says what is wrong with what is there instead."""
    if path.suffix == ".gguf":
        raise InputError(_gguf_advice(path))
    if path.is_file():
        raise InputError(f"{path} is a file; name the folder that holds config.json")
    config = path / "config.json"
    if config.is_file():
        return _read_json(config)
    weights = sorted(path.glob("*.gguf"))
    if weights:
        raise InputError(_gguf_advice(weights[0]))
    adapter = (
        " It holds an adapter; name its base model." * (path / "adapter_config.json").is_file()
    )
    raise InputError(f"{path} has no config.json, so it is not a model folder.{adapter}")


def _gguf_advice(path: Path) -> str:
    return (
        f"{path} is a GGUF file, whose weights are packed for inference. Convert it to a folder of"
        " safetensors first: AutoModelForCausalLM.from_pretrained(folder, gguf_file=...) in"
        " transformers reads it, or take the original model from the Hub."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}, line {error.lineno}: broken JSON ({error.msg}); download it again"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _checked(spec: ModelSpec, path: Path) -> ModelSpec:
    """The spec itself, when nothing in it is missing or contradicts."""
    where = path if path.name == "config.json" else path / "config.json"
    problem = _problem(spec)
    if problem:
        raise InputError(f"{where}: {problem}")
    return spec


def _problem(spec: ModelSpec) -> str | None:
    model_type = spec.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return "there is no 'model_type'; transformers cannot tell what model this is"
    method = spec.config.get("quantization_config")
    if method:
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        return f"the weights are already quantised ({name}); name the model they were made from"
    for key in _COUNTS:
        value = _lookup(spec.config, key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            # some families write a list, one entry per layer; those have no closed form
            if isinstance(value, list) and model_type not in _DENSE_FAMILIES:
                continue
            return f"{key!r} must be a whole number above 0, not {value!r}"
    return _contradiction(spec) if model_type in _DENSE_FAMILIES else None


def _contradiction(spec: ModelSpec) -> str | None:
    for key in (*_REQUIRED, "intermediate_size"):
        if _lookup(spec.config, key) is None:
            return f"{key!r} is missing; a {spec.model_type} model needs it"
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if _lookup(spec.config, "head_dim") is None and spec.hidden_size % heads:
        return (
            f"'hidden_size' {spec.hidden_size} is not a multiple of"
            f" 'num_attention_heads' {heads}, and there is no 'head_dim'"
        )
    if heads % kv_heads:
        return (
            f"'num_attention_heads' {heads} is not a multiple of 'num_key_value_heads' {kv_heads}"
        )
    return None


def _not_found(name: str, path: Path, hub_cache: Path) -> str:
    nearest = nearest_names(name)
    like = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return (
        f"there is no model {name!r}. Looked for:\n"
        f"  a folder {path.absolute()}: it does not exist\n"
        f"  the Hub cache {hub_cache}: no config.json of that name\n"
        f"  the built-in catalogue: not among its {len(catalogue_names())} names{like}\n"
        f"Download it with `hf download {name}`, or name a folder with config.json."
    )
