"""Finds config.json: as a file, in a model's folder, in the Hub cache on this machine, on the Hub.

Says what is wrong with what is there instead. Does not look into the content, nor at weights.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import InputError, ModelNotFoundError

# Files that older tools write beside packed weights, where newer ones write into config.json.
_QUANTISERS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_HUB_TIMEOUT_S = 5


@dataclass(frozen=True)
class ConfigFile:
    """A config.json that was read.

    Attributes:
        assumptions: what a user must know about the files beside it, one sentence each.
    """

    content: dict[str, Any]
    assumptions: tuple[str, ...] = ()


def local_path(name: str) -> Path | None:
    """The file or folder that the name is, `~` expanded; None when there is none."""
    path = as_path(name)
    try:
        return path if path.exists() else None
    except (OSError, ValueError):  # what cannot be a path names nothing
        return None


def as_path(name: str) -> Path:
    """The name as a path, `~` expanded where it is a home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def default_hub_cache() -> Path:
    """Where huggingface_hub keeps downloads, by the same environment variables."""
    home = os.environ.get("HF_HOME") or os.path.join(  # noqa: PTH118 (a user's variable, as text)
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or f"{home}/hub").expanduser()


def model_folder(name: str) -> Path:
    """Where the files of a model are: the folder that the name is, or that of the Hub cache.

    Raises:
        ModelNotFoundError: there is neither.
    """
    folder = local_path(name)
    if folder is not None:
        return folder
    config = _cached_file(name, "config.json", default_hub_cache())
    if config is None:
        raise ModelNotFoundError(f"{name} is neither a folder nor in the Hub cache")
    return config.parent


def read_cached(name: str, hub_cache: Path) -> ConfigFile | None:
    """config.json of a name in the Hub cache; None when the cache does not have it.

    Raises:
        InputError: it is broken, or the name is an adapter's.
    """
    config = _cached_file(name, "config.json", hub_cache)
    if config is not None:
        return ConfigFile(_read_json(config))
    adapter = _cached_file(name, "adapter_config.json", hub_cache)
    if adapter is not None:
        raise InputError(f"{name} is no model. {_adapter_advice(adapter)}")
    return None


def _cached_file(name: str, file: str, hub_cache: Path) -> Path | None:
    if not hub_cache.is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, cache_dir=hub_cache)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def fetch_from_hub(name: str, hub_cache: Path) -> ConfigFile:
    """config.json of a name on the Hub, downloaded into the cache; no other file is.

    Raises:
        ModelNotFoundError: the Hub does not give one; the message is the reason and nothing else.
        InputError: it is broken.
    """
    if name.count("/") != 1:
        raise ModelNotFoundError("names there are like organisation/model")
    if _is_offline():
        raise ModelNotFoundError("not asked, because HF_HUB_OFFLINE is set")
    return ConfigFile(_read_json(_download_config(name, hub_cache)))


def _is_offline() -> bool:
    """By huggingface_hub's rule; its own answer would be as old as its import."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in {"1", "ON", "YES", "TRUE"}


def _download_config(name: str, hub_cache: Path) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        # Asks once; a download alone asks seven times, for 23 s, where there is no network.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
        return Path(
            hub.hf_hub_download(
                name, "config.json", cache_dir=hub_cache, etag_timeout=_HUB_TIMEOUT_S
            )
        )
    except (HFValidationError, HTTPError, OSError) as error:
        raise ModelNotFoundError(_why_not_fetched(error)) from error


def _why_not_fetched(error: Exception) -> str:
    """In our words, because huggingface_hub's hold addresses and advice for its own functions."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "names there are like organisation/model"
    if isinstance(error, errors.GatedRepoError):
        return "gated: accept its licence there and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "has no such model, or it is private and HF_TOKEN does not open it"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "has it without config.json, as adapters and GGUF files are; name the base model"
    if isinstance(error, errors.HfHubHTTPError):
        return f"answered with an error, HTTP {error.response.status_code}"
    if isinstance(error, OSError):
        return f"config.json was not fetched ({error.strerror or type(error).__name__})"
    return f"could not be reached ({str(error) or type(error).__name__})"


def read_file(path: Path) -> ConfigFile:
    """The file as a config.json, whatever its name and whatever lies beside it.

    Raises:
        InputError: it is broken, an adapter's or a GGUF file, or does not end in .json.
    """
    if path.suffix.lower() == ".gguf":
        raise InputError(_gguf_advice(path))
    if path.suffix.lower() != ".json":
        raise InputError(f"{path} is a file; name the folder that holds config.json, or that file")
    if path.name == "adapter_config.json":
        raise InputError(f"{path} is no model. {_adapter_advice(path)}")
    return ConfigFile(_read_json(path))


def read_folder(path: Path) -> ConfigFile:
    """config.json of a model folder.

    Raises:
        InputError: it is broken, or there is something else: an adapter, a GGUF file, packed
            weights.
    """
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        raise InputError(f"{path} is no model folder. {_adapter_advice(adapter)}")
    packed = sorted(path.glob("*.gguf"))
    config = path / "config.json"
    if not config.is_file():
        if packed:
            raise InputError(_gguf_advice(packed[0]))
        raise InputError(f"{path} has no config.json, so it is not a model folder.")
    for file, method in _QUANTISERS.items():
        if (path / file).is_file():
            raise InputError(
                f"{path / file}: the weights are already quantised ({method}); "
                "name the model they were made from"
            )
    if packed and not any(path.glob("*.safetensors")):
        note = f"the only weights here are packed ({packed[0].name}); they count as unpacked"
        return ConfigFile(_read_json(config), (note,))
    return ConfigFile(_read_json(config))


def _adapter_advice(file: Path) -> str:
    base = _read_json(file).get("base_model_name_or_path")
    named = f", {base}" if isinstance(base, str) and base else ""
    return f"It holds an adapter; name its base model{named}."


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
    except (OSError, ValueError) as error:  # not UTF-8, or a number of thousands of digits
        raise InputError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be a config") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content
