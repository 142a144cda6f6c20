"""The shape of a model, read from its config.json without loading torch, transformers or weights.

A name is looked for as a local folder or file, then in the Hub cache on this machine, then in the
built-in catalogue, and only then on the Hub, whose config.json is all that is ever downloaded.
Knows nothing about precision, sharding or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.errors import InputError, ModelNotFoundError
from tightfit.facts.catalogue import catalogue_names, find_in_catalogue, nearest_names
from tightfit.facts.config_checks import check_config
from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.families import count_parameters
from tightfit.facts.model_files import (
    ConfigFile,
    as_path,
    default_hub_cache,
    fetch_from_hub,
    local_path,
    read_cached,
    read_file,
    read_folder,
)
from tightfit.facts.parameter_count import ParameterCounts

Source = Literal["folder", "file", "hub cache", "catalogue", "hub"]


@dataclass(frozen=True)
class ModelSpec(ConfigFields):
    """A model's config.json and where it was found.

    Attributes:
        name: the Hub name, or the folder or file as the user wrote it.
        config: the content of config.json, unchanged.
        assumptions: what a user must be told about it, one sentence each.
    """

    name: str
    source: Source
    config: dict[str, Any]
    assumptions: tuple[str, ...] = ()

    def parameter_counts(self) -> ParameterCounts | None:
        """Parameters of the causal language model, in its layers and outside.

        None for families without a closed form; their parameters are counted by building them.

        Raises:
            InputError: a field is missing or makes no sense (never after `load_model_spec`).
        """
        return count_parameters(self)

    def text_part(self) -> ModelSpec:
        """The language model inside a model of text and images, and the assumption that says so;
        itself when there is nothing else.

        Raises:
            InputError: the text part does not say what it is, or contradicts itself.
        """
        text = self.config.get("text_config")
        if not isinstance(text, dict):
            return self
        tied = {key: self.config[key] for key in ("tie_word_embeddings",) if key in self.config}
        said = f"only the text part of this {self.model_type} model is counted"
        spec = ModelSpec(self.name, self.source, tied | text, (*self.assumptions, said))
        check_config(spec)
        return spec


def load_model_spec(name_or_path: str, hub_cache: Path | None = None) -> ModelSpec:
    """The spec of a model folder, a config.json, or a Hub name.

    A name that neither the local cache nor the catalogue has is asked for on the Hub, for a few
    seconds at most, unless HF_HUB_OFFLINE is set; its config.json then stays in the cache.

    Args:
        hub_cache: the folder of the Hub cache; by default where HF_HOME puts it.

    Raises:
        ModelNotFoundError: there is no such model; the message lists where it was looked for.
        InputError: config.json is broken or contradicts itself, the weights are quantised, or it is
            an adapter.
    """
    if not name_or_path.strip():
        raise InputError("the model's name is empty; give a folder or a name on the Hub")
    path = local_path(name_or_path)
    hub_cache = hub_cache or default_hub_cache()
    if path is not None and path.is_file():
        return _checked(name_or_path, "file", read_file(path))
    if path is not None:
        return _checked(name_or_path, "folder", read_folder(path))
    cached = read_cached(name_or_path, hub_cache)
    if cached is not None:
        return _checked(name_or_path, "hub cache", cached)
    known = find_in_catalogue(name_or_path)
    if known is not None:
        return ModelSpec(known.name, "catalogue", known.config, known.assumptions)
    try:
        fetched = fetch_from_hub(name_or_path, hub_cache)
    except ModelNotFoundError as reason:
        raise ModelNotFoundError(_not_found(name_or_path, hub_cache, str(reason))) from reason
    return _checked(name_or_path, "hub", fetched)


def _checked(name: str, source: Source, file: ConfigFile) -> ModelSpec:
    spec = ModelSpec(name, source, file.content, file.assumptions)
    check_config(spec)
    return spec


def _not_found(name: str, hub_cache: Path, not_on_hub: str) -> str:
    nearest = nearest_names(name)
    like = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return (
        f"there is no model {name!r}. Looked for:\n"
        f"  a folder {as_path(name).absolute()}: it does not exist\n"
        f"  the Hub cache {hub_cache}: no config.json of that name\n"
        f"  the built-in catalogue: not among its {len(catalogue_names())} names{like}\n"
        f"  the Hub: {not_on_hub}\n"
        f"Check the name, or name a folder with config.json or that file. `hf download {name}` puts"
        " a model into the cache where the Hub can be reached."
    )
