"""Runs of `sharded_runs.py` on real processes: to make them, to read them, to compare them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.engine import sharded_runs as runs

_SINGLE = 10  # how often the tolerance of a whole parameter one of its values may be off


def made(folder: Path, *arguments: str) -> Path:
    """The folder, in which all runs of a set have left their results."""
    done = subprocess.run(
        [sys.executable, runs.PROGRAM, folder, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def read(folder: Path, case: str, ranks: int, who: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Numbers and tables, and parameters but those of 4 bits, of one run."""
    name = runs.file_name(case, ranks, who)
    saved = load_file(folder / f"{name}.safetensors")
    parameters = {key: value for key, value in saved.items() if value.is_floating_point()}
    return json.loads((folder / f"{name}.json").read_text()), parameters


def check_parameters(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Each is as expected, by the root mean square of its differences.

    AdamW divides a gradient by its own size, so where one is next to nothing its rounding is not: a
    single value may be off by more than all the others. A gradient that is wrong is off by some
    thousandths, whole steps of the learning rate.
    """
    for name, value in found.items():
        off = value.float() - expected[name].float()
        assert off.square().mean().sqrt() <= tolerance, name
        assert off.abs().max() <= _SINGLE * tolerance, name
