"""Every training run's predicted step time beside its measured one, in one file for all runs.

`$TIGHTFIT_CACHE/history.jsonl`: one JSON object per line, only ever added to. Several runs may add
at once, and one that is killed may leave half a line, which the next one ends and readers skip.
Nothing predicts from it: it says how far to trust the predictions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from math import comb
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from tightfit.dry_run.cache import cache_folder
from tightfit.planner.plan import Plan
from tightfit.planner.words import describe_policies

NAME = "history.jsonl"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class Part:
    """Seconds of one optimizer step; the measured median, None where nobody measures this part."""

    predicted: Seconds
    measured: Seconds | None


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class RunEntry:
    """One training run.

    Attributes:
        date: when it ended, ISO 8601, UTC.
        device: the card's name, or the CPU's.
        policies: in words.
        rates: what the prediction was made from, see `plan.RatesNote`.
        steps: whose median was taken.
        parts: predicted seconds by part, and measured ones of `step` and `communication`.
        versions: of torch and tightfit.
    """

    date: str
    model: str
    device: str
    ranks: Annotated[int, Field(gt=0)]
    policies: str
    rates: str
    steps: Annotated[int, Field(gt=0)]
    step: Part
    parts: dict[str, Part]
    versions: dict[str, str]

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of the step; None where nothing was measured."""
        measured = self.step.measured
        return (self.step.predicted - measured) / measured if measured else None


_ADAPTER = TypeAdapter(RunEntry)


def entry_of(
    plan: Plan,
    *,
    model: str,
    device: str,
    steps: int,
    step_seconds: float,
    communication_seconds: float,
) -> RunEntry:
    """The entry of a run that has ended now.

    Args:
        steps: whose medians the seconds are.
    """
    measured: dict[str, float] = {"communication": communication_seconds}
    predicted = {k: v for k, v in plan.step_time.to_json().items() if k != "total"}
    return RunEntry(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        device=device,
        ranks=plan.policies.sharding.ranks,
        policies=describe_policies(plan.policies),
        rates=plan.rates.source,
        steps=steps,
        step=Part(plan.step_time.total, step_seconds),
        parts={name: Part(value, measured.get(name)) for name, value in predicted.items()},
        versions={"torch": torch.__version__, "tightfit": version("tightfit")},
    )


def history_file() -> Path:
    """Where all runs of this user are."""
    return cache_folder() / NAME


def append_entry(entry: RunEntry, path: Path | None = None) -> None:
    """Add a run, in one write to the end of the file, on a line of its own.

    Raises:
        OSError: it cannot be written.
    """
    path = path or history_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _lock(descriptor)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + _ADAPTER.dump_json(entry) + b"\n")
    finally:
        os.close(descriptor)  # gives up the lock too


def _lock(descriptor: int) -> None:
    """Be the only one that looks at the end and writes, where the file system can tell; a write to
    the end is in one piece on most that cannot."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return


@plain_dataclass(frozen=True)
class History:
    """What the file holds.

    Attributes:
        unread: lines that are no entries: torn ones, or of another version.
    """

    entries: tuple[RunEntry, ...]
    unread: int

    def to_json(self) -> dict[str, Any]:
        """The object documented in docs/json.md."""
        errors = errors_of(self.entries)
        return {
            "runs": [
                {**_ADAPTER.dump_python(entry, mode="json"), "error": entry.error}
                for entry in self.entries
            ],
            "unread_lines": self.unread,
            "median_error": median(errors) if errors else None,
            "median_absolute_error": median(map(abs, errors)) if errors else None,
            "leans": lean_of(errors),
        }


def read_history(path: Path | None = None) -> History:
    """All runs, the oldest first; none where there is no file.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        content = (path or history_file()).read_bytes()
    except FileNotFoundError:
        return History((), 0)
    entries: list[RunEntry] = []
    unread = 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            entries.append(_ADAPTER.validate_json(line))
        except ValueError:
            unread += 1
    return History(tuple(entries), unread)


def errors_of(entries: Sequence[RunEntry]) -> list[float]:
    """Of those that have one."""
    return [entry.error for entry in entries if entry.error is not None]


_LEAST_RUNS = 5
_CHANCE = 0.1
_LEAST_MEDIAN = 0.05


def lean_of(errors: Sequence[float]) -> str | None:
    """`short` or `long` where predictions are so too often for chance, and by 5% or more in the
    middle; None where they are not, or where there are fewer than five.

    By a two-sided sign test: chance would give so uneven a split in fewer than 1 of 10 histories.
    """
    signed = [error for error in errors if error]
    if len(signed) < _LEAST_RUNS or abs(median(errors)) < _LEAST_MEDIAN:
        return None
    short = sum(error < 0 for error in signed)
    most = max(short, len(signed) - short)
    chance = 2 * sum(comb(len(signed), k) for k in range(most, len(signed) + 1)) / 2 ** len(signed)
    if chance >= _CHANCE:
        return None
    return "short" if 2 * short > len(signed) else "long"
