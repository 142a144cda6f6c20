"""From a YAML file and flags to a checked Job. Flags win over the file.

Flags, their help and the words of every complaint come from the fields of `Job`; this file adds
none of its own. Knows nothing about what a job does.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tightfit.cli.other_names import OTHER_NAMES, SWITCHES, translate
from tightfit.errors import ConfigError
from tightfit.facts.job import Job

_SWITCH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0", "auto", "none", "null")
_BOUNDS = {
    "exclusiveMinimum": "above {}",
    "minimum": "of at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "of at most {}",
}
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "null": "none"}


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
        group.add_argument(f"--{key}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Flags with underscores for dashes, and a bare switch (`--resume`) as `--resume=true`."""
    prepared: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name[2:].replace("-", "_")
        if not name.startswith("--") or key not in (*Job.model_fields, *OTHER_NAMES):
            prepared.append(word)
        elif not equals and _is_switch(key):
            given = rest.pop(0) if rest and _is_switched(key, rest[0]) else "true"
            prepared.append(f"--{key}={given}")
        else:
            prepared.append(f"--{key}{equals}{value}")
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


def load_job(config_path: Path | None, overrides: Mapping[str, Any]) -> Job:
    """The job of a YAML file (if given) with the flags put over it.

    Relative paths in the file are relative to the working directory, as for Hugging Face's tools.

    Raises:
        ConfigError: what is wrong, with the key, its value and what would be accepted.
    """
    settings: dict[str, Any] = {}
    labels: dict[str, str] = {}
    if config_path is not None:
        from_file = translate(read_yaml(config_path), f"{config_path}: ")
        settings |= from_file
        labels |= {key: f"{config_path}: {key}" for key in from_file}
    from_flags = translate(overrides, "--")
    settings |= from_flags
    labels |= {key: f"--{key}" for key in from_flags}
    for key in settings:
        if key not in Job.model_fields:
            raise ConfigError(f"{labels[key]} is not a known key.{_nearest(key)}")
    values = {key: _plain(key, value) for key, value in settings.items()}
    return _validated(values, labels)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of one flat YAML file.

    Raises:
        ConfigError: there is no such file, it is not YAML, not a mapping, or repeats a key.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}; name a YAML file with the job's keys"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_place(error)}") from error
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
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def accepted_by(key: str) -> str:
    """What a key accepts, in words."""
    return " or ".join(_alternatives(_schema()[key]))


@cache
def _schema() -> dict[str, dict[str, Any]]:
    properties: dict[str, dict[str, Any]] = Job.model_json_schema()["properties"]
    return properties


def _alternatives(schema: Mapping[str, Any]) -> Iterator[str]:
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _alternatives(option)
    elif "enum" in schema or "const" in schema:
        yield " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    elif schema["type"] == "boolean":
        yield "true | false"
    elif schema["type"] == "array":
        yield f"a comma-separated list of: {' or '.join(_alternatives(schema['items']))}"
    else:
        bounds = [text.format(schema[bound]) for bound, text in _BOUNDS.items() if bound in schema]
        if "minimum" in schema and "maximum" in schema:
            bounds = [f"from {schema['minimum']} to {schema['maximum']}"]
        yield " ".join([_TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _types(key: str) -> set[str]:
    """The JSON types that a key's values have."""
    schema = _schema()[key]
    return {option.get("type", "string") for option in schema.get("anyOf", [schema])}


def _metavar(key: str) -> str:
    choices = _schema()[key].get("enum")
    if choices:
        return "|".join(map(str, choices))
    names = {"boolean": "[true|false]", "integer": "N", "number": "X"}
    return next((name for type_, name in names.items() if type_ in _types(key)), "TEXT")


def _is_switch(key: str) -> bool:
    return key in SWITCHES or (
        key in Job.model_fields
        and (_types(key) == {"boolean"} or "true" in _schema()[key].get("enum", []))
    )


def _is_switched(key: str, word: str) -> bool:
    """Whether a word after a switch is its value, and no argument of its own."""
    own = _schema()[key].get("enum", []) if key in Job.model_fields else []
    return word.casefold() in (*_SWITCH_WORDS, *own)


def _nearest(key: str, prefix: str = "") -> str:
    """The key most like a wrong one, of tightfit's own keys first."""
    for known in ([*Job.model_fields], OTHER_NAMES):
        found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if found:
            return f" Did you mean {prefix}{found[0]}?"
    return " `tightfit train --help` lists the keys."


def _plain(key: str, value: Any) -> Any:
    """The value as Job takes it: no value for `none` where that is allowed, lists from commas."""
    types = _types(key)
    word = value.casefold() if isinstance(value, str) else None
    if word in ("none", "null") and "null" in types:
        return None
    if "array" in types:
        if value is None or word in ("", "none", "null"):
            return []
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return value


def _validated(values: dict[str, Any], labels: dict[str, str]) -> Job:
    """The job, when every value is of its key's type and range; all complaints at once."""
    try:
        job = Job.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(error, values, labels))) from error
    wrong = [key for key, value in values.items() if _is_no_number(getattr(job, key), key, value)]
    if wrong:
        raise ConfigError("\n".join(_complaint(key, values[key], labels) for key in wrong))
    return job


def _is_no_number(checked: Any, key: str, given: Any) -> bool:
    """Infinity, and `true` where pydantic would take it for 1."""
    if isinstance(given, bool):
        return not _is_switch(key) and isinstance(checked, int | float)
    return isinstance(checked, float) and not math.isfinite(checked)


def _complaints(
    error: ValidationError, values: Mapping[str, Any], labels: Mapping[str, str]
) -> Iterator[str]:
    seen: set[str] = set()
    for problem in error.errors():
        key = str(problem["loc"][0]) if problem["loc"] else ""
        if key in seen:
            continue
        seen.add(key)
        own_words = problem.get("ctx", {}).get("error")
        if not key:
            yield str(own_words)
        elif problem["type"] == "missing":
            yield f"{key} is missing; give it in the YAML file or as --{key}"
        elif isinstance(own_words, ValueError):
            yield f"{labels[key]}: {own_words}"
        else:
            yield _complaint(key, values[key], labels)


def _complaint(key: str, value: Any, labels: Mapping[str, str]) -> str:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    quotes = "; put it in quotes" if accepted_by(key).startswith("text") else ""
    return f"{labels[key]}: {shown} is not accepted; it must be {accepted_by(key)}{quotes}"


class _UniqueKeyLoader(yaml.SafeLoader):
    """Plain YAML in which a repeated key is an error, not a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _place(error: yaml.YAMLError) -> str:
    """Where and why YAML could not be read, in one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f": {problem}" if mark is None else f", line {mark.line + 1}: {problem}"
