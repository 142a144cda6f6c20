"""From a file of one tool to a file of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.facts.job import Job
from tightfit.facts.job_values import job_of
from tightfit.interop.formats import write_config
from tightfit.interop.reading import Reading
from tightfit.interop.settings import implied_beside
from tightfit.interop.translation import Note
from tightfit.interop.writing import Written

_NO_MODEL = "a model that is named elsewhere"


@dataclass(frozen=True)
class Conversion:
    """What was read and what is written.

    Attributes:
        missing: keys that a job needs and that neither the file nor a flag says.
    """

    reading: Reading
    written: Written
    missing: tuple[str, ...]


def convert(reading: Reading, overrides: Mapping[str, Any], format_name: str) -> Conversion:
    """The config in another format.

    Args:
        overrides: keys of a job that win over the file's.

    Raises:
        ConfigError: a value is none that a job takes, or the format cannot be written.
    """
    settings = {**implied_beside(reading, overrides), **reading.keys, **overrides}
    places = {key: reading.places.get(key, f"{reading.name}: {key}") for key in settings}
    places |= {key: f"--{key}" for key in overrides}
    job = job_of({"model_name_or_path": _NO_MODEL, **settings}, places)
    keys = plain_keys(job, settings)
    missing = () if format_name != "tightfit" else tuple(
        name for name in ("model_name_or_path", "dataset", "output_dir") if name not in keys
    )  # fmt: skip
    return Conversion(reading, write_config(keys, format_name), missing)


def plain_keys(job: Job, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a checked job for the keys that were said, in the order of a job's keys."""
    values = job.model_dump(include=set(settings))
    return {key: values[key] for key in Job.model_fields if key in values}


def notes_to_show(reading: Reading) -> list[Note]:
    """A reading's notes, without those whose keys somebody else has said."""
    return [note for note in reading.notes if note.key or not _was_said(note, reading)]


def _was_said(note: Note, reading: Reading) -> bool:
    names = {part.partition(":")[0].strip() for part in note.here.split(",") if part}
    return bool(names) and names <= reading.keys.keys()
