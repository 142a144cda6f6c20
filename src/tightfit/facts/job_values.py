"""What a job's keys accept, in words, and a checked job from values that may be wrong.

The words of every complaint come from the fields of `Job`. Does not know where values come from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from tightfit.errors import ConfigError
from tightfit.facts.job import Job

_BOUNDS = {
    "exclusiveMinimum": "above {}",
    "minimum": "of at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "of at most {}",
}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "none",
    "object": "names with values, as YAML or JSON",
}


def accepted_by(key: str) -> str:
    """What a key accepts, in words."""
    return " or ".join(_alternatives(schema_of_keys()[key]))


@cache
def schema_of_keys() -> dict[str, dict[str, Any]]:
    """The JSON schema of each key's values."""
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


def types_of(key: str) -> set[str]:
    """The JSON types that a key's values have."""
    schema = schema_of_keys()[key]
    return {option.get("type", "string") for option in schema.get("anyOf", [schema])}


def is_switch(key: str) -> bool:
    """Whether a key's values are those of a switch."""
    return types_of(key) == {"boolean"} or "true" in schema_of_keys()[key].get("enum", [])


def job_of(values: dict[str, Any], labels: Mapping[str, str]) -> Job:
    """The job of these values.

    Args:
        values: of known keys.
        labels: what each key is called where it was written.

    Raises:
        ConfigError: what is wrong, with the key, its value and what would be accepted; all
            complaints at once.
    """
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
        return not is_switch(key) and isinstance(checked, int | float)
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
            yield f"{own_words}{_places_of(str(own_words), labels)}"
        elif problem["type"] == "missing":
            yield f"{key} is missing; give it in the YAML file or as --{key}"
        elif isinstance(own_words, ValueError):
            yield f"{labels[key]}: {own_words}"
        else:
            yield _complaint(key, values[key], labels)


def _places_of(said: str, labels: Mapping[str, str]) -> str:
    """Where a file says what a complaint about several keys is about, and under which names."""
    words = set(re.findall(r"\w+", said))
    places = [label for key, label in labels.items() if key in words and ", line " in label]
    return f" ({'; '.join(places)})" if places else ""


def _complaint(key: str, value: Any, labels: Mapping[str, str]) -> str:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    quotes = "; put it in quotes" if accepted_by(key).startswith("text") else ""
    return f"{labels[key]}: {shown} is not accepted; it must be {accepted_by(key)}{quotes}"
