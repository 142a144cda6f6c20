"""What becomes of a config.json on its way to a model of transformers."""

from __future__ import annotations

import copy

from tightfit.dry_run.config import load_config
from tightfit.facts.catalogue import catalogue_names, find_in_catalogue


def test_no_config_of_the_catalogue_is_written_to() -> None:
    """transformers puts what it derives into the mappings it is given, and kept dry runs are found
    again by their config."""
    for name in catalogue_names():
        entry = find_in_catalogue(name)
        assert entry is not None
        before = copy.deepcopy(entry.config)
        load_config(dict(entry.config))
        assert entry.config == before, name
