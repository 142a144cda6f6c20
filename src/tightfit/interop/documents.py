"""Files of keys: JSON, YAML and TOML, with the line of every key.

Knows no keys. Whatever a file holds, what is wrong with it is a `ConfigError`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tightfit.errors import ConfigError

Path_ = tuple[str, ...]  # of keys, from the outermost block inwards

# What PyYAML's own constructors let through for values that are no value of their tag.
_YAML_FAULTS = (ValueError, RecursionError, IndexError, KeyError, AttributeError, TypeError)
_DEEPEST = 64


@dataclass(frozen=True)
class Document:
    """The blocks of keys in a file.

    Attributes:
        name: of the file, for messages.
        content: text, numbers, switches, lists and blocks by key.
        lines: of each key, counted from 1; a key that is not there has none.
    """

    name: str
    content: dict[str, Any]
    lines: Mapping[Path_, int] = field(default_factory=dict)

    def where(self, *keys: str) -> str:
        """`ds_config.json, line 3: zero_optimization.stage`."""
        line = self.lines.get(keys)
        place = self.name if line is None else f"{self.name}, line {line}"
        return f"{place}: {'.'.join(keys)}"


def read_document(path: Path) -> Document:
    """The keys of a file; TOML and JSON by the ending of its name, else JSON or YAML as it begins.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it holds no block of keys.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return document_of(text, str(path))


def document_of(text: str, name: str) -> Document:
    """The keys in `text`; raises as `read_document`."""
    if name.endswith(".toml"):
        return _checked(_toml(text, name), name, _toml_lines(text))
    if name.endswith((".json", ".hjson")) or text.lstrip().startswith("{"):
        return _checked(_json(text, name), name, _json_lines(text))
    return _checked(_yaml(text, name), name, _yaml_lines(text))


def _checked(content: Any, name: str, lines: Mapping[Path_, int]) -> Document:
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigError(f"{name} {found}; it must hold keys with values")
    return Document(name, _plain(content, name, 0), lines)


def _plain(value: Any, name: str, depth: int) -> Any:
    """Keys as text; blocks inside of themselves, which YAML can write, refused."""
    if depth > _DEEPEST:
        raise ConfigError(f"{name}: blocks are nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        return {_printable(key): _plain(part, name, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, name, depth + 1) for part in value]
    return value


def _printable(key: Any) -> str:
    """A key that a message can show."""
    text = str(key)
    return text if text.isprintable() else ascii(text)


# JSON


def _json(text: str, name: str) -> Any:
    def block(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{name}: the key {key!r} is there twice; keep one")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=block)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|\n')


def _json_lines(text: str) -> dict[Path_, int]:
    """The line of each key of valid JSON."""
    lines: dict[Path_, int] = {}
    path: list[str] = []
    blocks: list[str] = []
    line, last = 1, ""
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token in "{[":
            blocks.append(token)
            path.append("")
        elif token in "}]":
            blocks.pop()
            path.pop()
        elif token == ":" and blocks and blocks[-1] == "{":
            path[-1] = json.loads(last, strict=False)
            lines[tuple(path)] = line
        elif token.startswith('"'):
            last = token
    return lines


# YAML


class UniqueKeyLoader(yaml.SafeLoader):
    """Plain YAML in which a repeated key is an error, not a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A block of keys; see the class."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def place_in_yaml(error: yaml.YAMLError) -> str:
    """Where and why YAML could not be read, in one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f": {problem}" if mark is None else f", line {mark.line + 1}: {problem}"


def _yaml(text: str, name: str) -> Any:
    try:
        return yaml.load(text, UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}{place_in_yaml(error)}") from None
    except _YAML_FAULTS as error:
        raise ConfigError(
            f"{name} cannot be read: a value that YAML cannot hold ({error})"
        ) from None


def _yaml_lines(text: str) -> dict[Path_, int]:
    root = yaml.compose(text, yaml.SafeLoader)
    return {} if root is None else dict(_lines_below(root, ()))


def _lines_below(node: yaml.Node, path: Path_) -> Iterator[tuple[Path_, int]]:
    if not isinstance(node, yaml.MappingNode) or len(path) > _DEEPEST:
        return
    for key, value in node.value:
        inner = (*path, str(key.value))
        yield inner, key.start_mark.line + 1
        yield from _lines_below(value, inner)


# TOML


def _toml(text: str, name: str) -> Any:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _toml_lines(text: str) -> dict[Path_, int]:
    """The lines of plain keys under plain headings, which is how people write TOML."""
    lines: dict[Path_, int] = {}
    section: Path_ = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := re.fullmatch(r"\s*\[([\w.]+)\]\s*(?:#.*)?", line):
            section = tuple(heading[1].split("."))
            lines[section] = number
        elif key := re.match(r"\s*([\w.]+)\s*=", line):
            lines[(*section, *key[1].split("."))] = number
    return lines
