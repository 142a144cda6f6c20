"""Well-known architectures for planning without a download, looked up by name.

`models/*.json` hold the config.json of each model, one file per maker: what shapes the model, not
what names its tokens. An entry with `like` takes every field of another one that it does not have
itself. Knows nothing about weights, folders or the Hub.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_FOLDER = Path(__file__).with_name("models")

# Keys of an entry that are no fields of a config but say what a user must be told.
_NOTES = {
    "equivalent_of": "transformers has no {value!r} architecture, and code from a model's folder is"
    " never run; a {model_type} model with the same parameters stands for it",
    "text_part_of": "only the text part of this {value} model is counted, not its vision part",
    "published_in": "the weights are published in {value}; they count as unpacked",
}


class CatalogueEntry(NamedTuple):
    """One model of the catalogue.

    Attributes:
        name: as the Hub spells it.
        config: the content of its config.json.
        assumptions: where the config is not the published model's, one sentence each.
    """

    name: str
    config: dict[str, Any]
    assumptions: tuple[str, ...]


@cache
def _entries() -> dict[str, CatalogueEntry]:
    """Every entry by its name."""
    entries = {}
    for file in sorted(_FOLDER.glob("*.json")):
        models = json.loads(file.read_text(encoding="utf-8"))
        for name, fields in models.items():
            entries[name] = _entry(name, models.get(fields.get("like"), {}) | fields)
    return entries


def _entry(name: str, fields: dict[str, Any]) -> CatalogueEntry:
    notes = tuple(
        note.format(value=fields[key], model_type=fields["model_type"])
        for key, note in _NOTES.items()
        if key in fields
    )
    config = {key: value for key, value in fields.items() if key not in (*_NOTES, "like")}
    return CatalogueEntry(name, config, notes)


@cache
def _by_folded_name() -> dict[str, CatalogueEntry]:
    """Entries by the last part of their name and by the whole name, in lower case.

    Where two owners use the same last part, the first to be read has it.
    """
    by_last_part: dict[str, CatalogueEntry] = {}
    for name, entry in _entries().items():
        by_last_part.setdefault(name.casefold().rpartition("/")[2], entry)
    return by_last_part | {name.casefold(): entry for name, entry in _entries().items()}


def catalogue_names() -> list[str]:
    """Every name in the catalogue, as the Hub spells it."""
    return list(_entries())


def find_in_catalogue(name: str) -> CatalogueEntry | None:
    """The entry for a full name or its last part, in any case; its config is a copy."""
    entry = _by_folded_name().get(name.casefold())
    return None if entry is None else entry._replace(config=dict(entry.config))


def nearest_names(name: str, count: int = 3) -> list[str]:
    """The catalogue names most like `name`; none when nothing is."""
    by_last_part = {known.casefold().rpartition("/")[2]: known for known in _entries()}
    last_part = name.casefold().rstrip("/").rpartition("/")[2]
    found = difflib.get_close_matches(last_part, by_last_part, n=count, cutoff=0.5)
    return [by_last_part[part] for part in found]


# What names of one family differ in: how many parameters, and what was made of the base.
_SIZE = re.compile(r"[-_]?v?(\d+x)?\d+(\.\d+)?[bm]\b.*", re.IGNORECASE)


def family_of(name: str) -> list[CatalogueEntry]:
    """The entries whose names differ from `name` in the size and what follows it, that one among
    them; none where the catalogue does not have it."""
    entry = find_in_catalogue(name)
    if entry is None:
        return []
    family = _SIZE.sub("", entry.name)
    return [other for other in _entries().values() if _SIZE.sub("", other.name) == family]
