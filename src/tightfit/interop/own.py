"""A job's own YAML among the formats, so that it can be written as another and another as it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.interop.documents import Document
from tightfit.interop.entries import nearest
from tightfit.interop.other_names import OTHER_NAMES, translate
from tightfit.interop.reading import Reading, Tool
from tightfit.interop.translation import Ranks
from tightfit.interop.writing import Written, as_yaml


def read_own(document: Document, ranks: Ranks) -> Reading:
    """The keys of a job, under its own names and those of others that it takes.

    Raises:
        ConfigError: a key is unknown, or two contradict.
    """
    for key in document.content:
        if key not in Job.model_fields and key not in OTHER_NAMES:
            raise ConfigError(
                f"{document.where(key)} is not a known key.{nearest(key, Job.model_fields)}"
            )
    keys = translate(document.content, f"{document.name}: ")
    places = {key: document.where(key) for key in keys}
    tool = Tool("tightfit", "ddp")
    return Reading(document.name, "tightfit", keys, {}, places, (), tool)


def write_own(keys: Mapping[str, Any]) -> Written:
    """A job's YAML."""
    return Written(as_yaml(keys, ["A job of tightfit."]), ())
