"""From a YAML file and flags to a checked Job. Flags win over the file.

Flags, their help and the words of every complaint come from the fields of `Job`; this file adds
none of its own. Knows nothing about what a job does.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tightfit.errors import ConfigError
from tightfit.facts.catalogue import catalogue_names
from tightfit.facts.job import Job
from tightfit.facts.job_values import accepted_by, is_switch, job_of, schema_of_keys, types_of
from tightfit.interop.documents import UniqueKeyLoader, place_in_yaml
from tightfit.interop.other_names import (
    CONFIG_FILES,
    OTHER_NAMES,
    SWITCHES,
    is_off,
    translate,
)
from tightfit.interop.reading import Reading
from tightfit.interop.settings import check_agree, implied_beside, read_config_file

_SWITCH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0", "auto", "none", "null")
_CONFIG_HELP = {
    "config": "A config of another tool that the keys are taken from: DeepSpeed, accelerate, "
    "LLaMA-Factory, transformers, FSDP or torchtitan. Flags win; what the file at JOB says "
    "otherwise is an error.",
    "deepspeed": "The same, for a ds_config.json.",
}

# Flags


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for every key of a Job; names of other tools are taken but not shown."""
    group = parser.add_argument_group(
        "keys of the job", "Also keys of the YAML file; flags win. Dashes may replace underscores."
    )
    for key, field in Job.model_fields.items():
        default = default_of(key)
        note = "" if default == "none" else f" [{default}]"
        help_text = f"{field.description}{note}".replace("%", "%%").replace("`", "")
        group.add_argument(
            f"--{key}", default=argparse.SUPPRESS, help=help_text, metavar=_metavar(key)
        )
    for key in OTHER_NAMES:
        help_text = _CONFIG_HELP.get(key, argparse.SUPPRESS)
        group.add_argument(f"--{key}", default=argparse.SUPPRESS, help=help_text, metavar="FILE")


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Flags with underscores for dashes, each in one word with its value, and a bare switch
    (`--resume`) as `--resume=true`.

    Raises:
        ConfigError: a flag that needs a value has none.
    """
    prepared: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name[2:].replace("-", "_")
        if not name.startswith("--") or key not in (*Job.model_fields, *OTHER_NAMES):
            prepared.append(word)
        elif equals:
            prepared.append(f"--{key}={value}")
        elif _is_switch(key):
            given = rest.pop(0) if rest and _is_switched(key, rest[0]) else "true"
            prepared.append(f"--{key}={given}")
        elif not rest or rest[0].startswith("--"):
            raise ConfigError(f"--{key} has no value; it must be {_accepted(key)}")
        else:
            prepared.append(f"--{key}={rest.pop(0)}")  # also one that starts with a dash
    return prepared


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among parsed arguments, as written."""
    known = (*Job.model_fields, *OTHER_NAMES)
    return {key: value for key, value in vars(arguments).items() if key in known}


def complain_about(unknown: Sequence[str]) -> None:
    """Raise ConfigError for words that argparse did not recognise, if there are any."""
    for word in unknown:
        if word.startswith("--"):
            key = word[2:].partition("=")[0].replace("-", "_")
            raise ConfigError(f"unknown flag --{key}.{_nearest(key, '--')}")
    if unknown:
        raise ConfigError(
            f"unexpected argument {unknown[0]!r}; a setting needs a flag, like --output_dir DIR"
        )


# Jobs


def load_job(
    config_path: Path | None,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Job:
    """The job alone of `load`."""
    return load(config_path, overrides, defaults)[0]


def load(
    config_path: Path | None,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    beside_config: Mapping[str, Any] | None = None,
) -> tuple[Job, Reading | None]:
    """The job of a YAML file (if given) with the flags put over it, and the config of another tool
    that either names.

    Relative paths in the file are relative to the working directory, as for Hugging Face's tools.

    Args:
        defaults: of keys that neither says, where a launcher knows better than the job's own.
        beside_config: defaults where there is a config of another tool.

    Raises:
        ConfigError: what is wrong, with the key, its value and what would be accepted.
    """
    written = {} if config_path is None else read_yaml(config_path)
    from_file = translate(written, f"{config_path}: ")
    from_flags = translate(overrides, "--")
    labels = {key: f"{config_path}: {key}" for key in from_file}
    labels |= {key: f"--{key}" for key in from_flags}
    settings = {**from_file, **from_flags}
    reading = _config_in({**(defaults or {}), **written, **overrides}, written, overrides)
    if reading is not None:
        beside_flags = {key: from_file[key] for key in from_file if key not in from_flags}
        check_agree(reading, beside_flags, labels)
        implied = implied_beside(reading, settings)
        settings = {**(beside_config or {}), **implied, **reading.keys, **settings}
        labels = {**{key: f"{reading.name}: {key}" for key in settings}, **reading.places, **labels}
    for key in settings:
        if key not in Job.model_fields:
            raise ConfigError(f"{labels[key]} is not a known key.{_nearest(key)}")
    values = {key: _plain(key, value) for key, value in settings.items()}
    return job_of({**(defaults or {}), **values}, labels), reading


def _config_in(
    settings: Mapping[str, Any], written: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Reading | None:
    """What the config of another tool says that flags or a file name; flags win.

    Raises:
        ConfigError: two are named, or it cannot be read.
    """
    for source, prefix in ((overrides, "--"), (written, "")):
        named = [key for key in CONFIG_FILES if not is_off(source.get(key))]
        if len(named) > 1:
            raise ConfigError(f"{prefix}{' and '.join(named)} both name a config; keep one")
        if named:
            (key,) = named
            form = "deepspeed" if key == "deepspeed" else None
            return read_config_file(source[key], prefix + key, settings, form)
    return None


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of one flat YAML file.

    Raises:
        ConfigError: there is no such file, it is not YAML, not a mapping, or repeats a key.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}; name a YAML file with the job's keys"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{place_in_yaml(error)}") from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigError(f"{path} {found}; it must hold lines like `learning_rate: 5e-5`")
    return {str(key): value for key, value in content.items()}


def default_of(key: str) -> str:
    """A key's default as one writes it; `required` when there is none."""
    field = Job.model_fields[key]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(value) or "none"
    if value == {}:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _metavar(key: str) -> str:
    choices = schema_of_keys()[key].get("enum")
    if choices:
        return "|".join(map(str, choices))
    names = {"boolean": "[true|false]", "integer": "N", "number": "X"}
    return next((name for type_, name in names.items() if type_ in types_of(key)), "TEXT")


def _is_switch(key: str) -> bool:
    return key in SWITCHES or (key in Job.model_fields and is_switch(key))


def _is_switched(key: str, word: str) -> bool:
    """Whether a word after a switch is its value, and no argument of its own."""
    own = schema_of_keys()[key].get("enum", []) if key in Job.model_fields else []
    if word.casefold() in (*_SWITCH_WORDS, *own):
        return True
    return not word.startswith("--") and not _may_be_a_job(word)


def _may_be_a_job(word: str) -> bool:
    """Whether a word is a file, a folder or a model's name: what stands on a command line without a
    flag."""
    named = "/" in word or Path(word).suffix in (".yaml", ".yml", ".json")
    return named or Path(word).exists() or word in catalogue_names()


def _accepted(key: str) -> str:
    """What a key, or the one that another tool's name stands for, accepts."""
    return accepted_by(key) if key in Job.model_fields else "given after it"


def _nearest(key: str, prefix: str = "") -> str:
    """The key most like a wrong one, of tightfit's own keys first."""
    for known in ([*Job.model_fields], OTHER_NAMES):
        found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if found:
            return f" Did you mean {prefix}{found[0]}?"
    return " `tightfit train --help` lists the keys."


def _plain(key: str, value: Any) -> Any:
    """The value as Job takes it: no value for `none` where that is allowed, lists from commas."""
    types = types_of(key)
    word = value.casefold() if isinstance(value, str) else None
    if word in ("none", "null") and "null" in types:
        return None
    if "array" in types:
        if value is None or word in ("", "none", "null"):
            return []
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return value
