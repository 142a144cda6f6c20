"""What a tool's key accepts and what becomes of it here: the rows that tables of keys are made of.

The tables in the files beside this one are the only place where a foreign key is described;
readers, error messages and docs/interop.md are made from them. Knows no tool.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tightfit.errors import ConfigError
from tightfit.interop.documents import Document

AUTO = "auto"  # DeepSpeed's and Hugging Face's word for "as the training script says"


class Accepts(StrEnum):
    """The values of a key, in words."""

    SWITCH = "true or false"
    COUNT = "a whole number of at least 0"
    NUMBER = "a number"
    TEXT = "text"
    ANYTHING = "anything"


@dataclass(frozen=True)
class Entry:
    """One key of a tool.

    Attributes:
        key: its path, with dots between blocks.
        accepts: its values; `ANYTHING` for blocks that are not looked into.
        becomes: the keys of a job that it sets; empty where it has no counterpart.
        here: what happens here instead, or what is different; a sentence without a full stop.
        usual: values that ask for what happens here anyway; nothing is said about them.
        words: the only values that text may have.
        refused: whether another value than `usual` is an error, because the run would be another.
    """

    key: str
    accepts: Accepts
    becomes: str = ""
    here: str = ""
    usual: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    refused: bool = False


Table = Mapping[str, Entry]


def table_of(*parts: tuple[Entry, ...]) -> dict[str, Entry]:
    """Entries by key."""
    table = {entry.key: entry for entries in parts for entry in entries}
    assert len(table) == sum(map(len, parts)), "a key stands in a table twice"
    return table


@dataclass(frozen=True)
class Found:
    """A key in a file.

    Attributes:
        written: as it stands there.
        value: checked, or `auto`.
        place: file, line and key, for messages.
    """

    entry: Entry
    written: str
    value: Any
    place: str


def entries_in(
    document: Document, table: Table, tool: str, *, block: tuple[str, ...] = ()
) -> dict[str, Found]:
    """The keys of a document, or of a block of it, by their path inside the block.

    Keys without a value (`null`) are left out: they are as if they were not there.

    Raises:
        ConfigError: a key is none of the tool's, or its value is not accepted.
    """
    content: Any = document.content
    for name in block:
        content = content[name]
    return {
        found.entry.key: found
        for found in _entries_below(document, table, tool, content, block, len(block))
    }


def _entries_below(
    document: Document,
    table: Table,
    tool: str,
    content: Mapping[str, Any],
    path: tuple[str, ...],
    start: int,
) -> Iterator[Found]:
    for name, value in content.items():
        inner = (*path, name)
        key, place = ".".join(inner[start:]), document.where(*inner)
        entry = table.get(key)
        has_parts = any(other.startswith(f"{key}.") for other in table)
        if isinstance(value, dict) and has_parts:
            yield from _entries_below(document, table, tool, value, inner, start)
        elif entry is not None:
            checked = check_value(entry, value, place)
            if checked is not None:
                yield Found(entry, ".".join(inner), checked, place)
        elif has_parts:
            if value is not None:
                raise ConfigError(f"{place}: {shown(value)} is not accepted; it is a block of keys")
        else:
            raise ConfigError(f"{place} is not a key of {tool}.{nearest(key, table)}")


def check_value(entry: Entry, value: Any, place: str) -> Any:
    """The value as the entry's type, None where there is none.

    Raises:
        ConfigError: it is of another type, or none of the entry's words.
    """
    if value is None or value == AUTO:
        return value
    found = _CHECKS[entry.accepts](value)
    if found is None:
        raise ConfigError(f"{place}: {shown(value)} is not accepted; it must be {entry.accepts}")
    if entry.words and str(found).casefold() not in map(str.casefold, entry.words):
        raise ConfigError(
            f"{place}: {shown(value)} is not accepted; it must be one of {', '.join(entry.words)}"
        )
    return found


def _switch(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.casefold())
    return bool(value) if isinstance(value, bool) or value in (0, 1) else None


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    return value if isinstance(value, int) else number


def _count(value: Any) -> int | None:
    number = _number(value)
    if number is None or number < 0 or number != int(number):
        return None
    return int(number)


def _text(value: Any) -> str | None:
    return None if isinstance(value, dict | list) else shown(value).strip("'")


_CHECKS: dict[Accepts, Callable[[Any], Any]] = {
    Accepts.SWITCH: _switch,
    Accepts.COUNT: _count,
    Accepts.NUMBER: _number,
    Accepts.TEXT: _text,
    Accepts.ANYTHING: lambda value: value,
}


def nearest(key: str, table: Mapping[str, Any]) -> str:
    """A sentence that names the keys most like a wrong one, in its own block first."""
    block, _, name = key.rpartition(".")
    known = list(dict.fromkeys(path for entry in table for path in _with_blocks(entry)))
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == block}
    found = [beside[n] for n in difflib.get_close_matches(name, beside, n=3, cutoff=0.6)]
    if not found:
        elsewhere = {k.rpartition(".")[2]: k for k in known}
        close = difflib.get_close_matches(name, elsewhere, n=3, cutoff=0.75)
        found = [elsewhere[n] for n in close]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _with_blocks(key: str) -> list[str]:
    """The blocks that a key stands in, which tables do not name by themselves, and the key."""
    parts = key.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def shown(value: Any) -> str:
    """A value as a message can show it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "so large a number"
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
