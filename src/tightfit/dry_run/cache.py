"""Dry runs kept on disk, so that a job that was priced before is priced at once. No torch.

A result depends on the architecture, the policies, the workload, the libraries and tightfit's own
code; all of them are in the name of its file. Where the folder cannot be used, nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tightfit.dry_run.result import DryRun
from tightfit.facts.workload import Workload
from tightfit.policies import OptimizerPolicy, Policies

FOLDER_VARIABLE = "TIGHTFIT_CACHE"
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def cache_folder() -> Path:
    """`$TIGHTFIT_CACHE`, else `tightfit` in the user's cache folder."""
    own = os.environ.get(FOLDER_VARIABLE)
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tightfit"


def entry_of(
    config: Mapping[str, Any], policies: Policies, workload: Workload, **options: object
) -> Path:
    """The file that holds, or would hold, this dry run."""
    optimizer = policies.optimizer
    numbers = OptimizerPolicy(optimizer.name, master=optimizer.master)  # takes memory
    described = {
        "config": config,
        "policies": {**asdict(policies), "optimizer": asdict(numbers)},
        "workload": {**asdict(workload), "average_sequence_length": 0},  # decides time only
        "options": options,
        "versions": _versions(),
    }
    text = json.dumps(described, sort_keys=True, default=str)
    return cache_folder() / "dry_runs" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def read_entry(entry: Path) -> DryRun | None:
    """The dry run in a file; None where there is none, or something else."""
    try:
        return DryRun.from_json(json.loads(entry.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_entry(entry: Path, run: DryRun) -> None:
    """Keep a dry run; whole or not at all, and silently not where the folder cannot be written."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=entry.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(run.to_json(), file)
        Path(file.name).replace(entry)
    except OSError:
        return


@cache
def _versions() -> dict[str, str]:
    return {name: _version(name) for name in _LIBRARIES} | {"tightfit": _own_code()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _own_code() -> str:
    """A fingerprint of tightfit's sources: size and time of every file."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    seen = [(str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()
