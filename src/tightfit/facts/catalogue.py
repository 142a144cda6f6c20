"""Well-known architectures for planning without a download: `catalogue.json`, looked up by name.

Each entry holds the config.json of one model and the names of its tuned variants with the fields
in which they differ. Knows nothing about weights, folders or the Hub.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("catalogue.json")


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """The config of every name, variants included."""
    configs: dict[str, dict[str, Any]] = {}
    for entry in json.loads(_FILE.read_text()):
        configs[entry["name"]] = entry["config"]
        for variant, differences in entry["variants"].items():
            configs[variant] = entry["config"] | differences
    return configs


def catalogue_names() -> list[str]:
    """Every name in the catalogue, as the Hub spells it."""
    return list(_entries())


def find_in_catalogue(name: str) -> tuple[str, dict[str, Any]] | None:
    """The Hub name and a copy of the config for a full name or its last part, in any case."""
    wanted = name.casefold()
    for known, config in _entries().items():
        if wanted in (known.casefold(), known.casefold().rpartition("/")[2]):
            return known, dict(config)
    return None


def nearest_names(name: str, count: int = 3) -> list[str]:
    """The catalogue names most like `name`; none when nothing is."""
    by_last_part = {known.casefold().rpartition("/")[2]: known for known in _entries()}
    last_part = name.casefold().rstrip("/").rpartition("/")[2]
    found = difflib.get_close_matches(last_part, by_last_part, n=count, cutoff=0.5)
    return [by_last_part[part] for part in found]
