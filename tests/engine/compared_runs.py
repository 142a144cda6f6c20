"""Runs of `sharded_runs.py` on real processes: to make them, to read them, to compare them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine import sharded_runs as runs
from tests.taken import asked_for

_SINGLE = 10  # how often the tolerance of a whole parameter one of its values may be off


def is_narrow(case: str) -> bool:
    """Whether it computes in 16 bits."""
    return not {"bf16", "fp16"}.isdisjoint(case.split())


Cases = Mapping[int, Sequence[str]]  # by the number of ranks


def with_more(cases: Cases, more: Cases) -> list[Any]:
    """Parameters `ranks` and `case` of tests: those of `more` are slow."""
    return [(ranks, case) for ranks, some in cases.items() for case in some] + [
        pytest.param(ranks, case, marks=pytest.mark.slow)
        for ranks, some in more.items()
        for case in some
    ]


def chosen(request: pytest.FixtureRequest, *always: tuple[int, str]) -> Cases:
    """Those that the tests of this module ask for which were chosen to run, and some others."""
    asked = dict.fromkeys([*always, *asked_for(request, "ranks", "case")])
    cases: dict[int, list[str]] = {}
    for ranks, case in asked:
        cases.setdefault(ranks, []).append(case)
    return cases


def made(folder: Path, cases: Cases, *arguments: str) -> Path:
    """The folder, in which all runs have left their results."""
    done = subprocess.run(
        [sys.executable, runs.PROGRAM, folder, json.dumps(cases), *arguments],
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


def losses(folder: Path, case: str, ranks: int) -> list[float]:
    """Of the global batch in each step: the sum over ranks that see other sequences."""
    sharding = runs.policies_of(case, ranks).sharding
    apart = range(0, ranks // sharding.pipeline_parallel, sharding.tensor_parallel)
    each = [read(folder, case, ranks, str(rank))[0]["losses"] for rank in apart]
    return [sum(parts) for parts in zip(*each, strict=True)]


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
