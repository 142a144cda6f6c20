"""The folders of checkpoints in a run's output folder. Knows their names, not what is in them, and
imports nothing heavy: a mistake in an output folder is said before anything else is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(output_dir: Path) -> list[Path]:
    """Those that are whole, in the order of their steps."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The one with the highest step, if there is any."""
    return next(reversed(checkpoints(output_dir)), None)


def unfinished(folder: Path) -> Path:
    """A checkpoint's name while it is not whole."""
    return folder.with_name(f".{folder.name}.incomplete")


def flush(paths: list[Path]) -> None:
    """Force files and folders to the disk, so that a name never stands for what is not there."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])
