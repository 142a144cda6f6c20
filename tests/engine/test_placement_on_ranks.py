"""Placements on two ranks train as resident ranks do, bit for bit, and as one rank does.

`ranked_runs.py` makes the runs, on real processes; here they are judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.engine.ranked_runs import (
    ACCUMULATIONS,
    ADAPTERS,
    LEARNING_RATE,
    OPTIMIZERS,
    PLACEMENTS,
    RESIDENT,
    STAGES,
    Case,
)

from tightfit.policies import OptimizerName

PROGRAM = Path(__file__).with_name("ranked_runs.py")
MICRO_BATCHES, FEW_MICRO_BATCHES = 20, 8  # of each rank
AWAY = [placement for placement in PLACEMENTS if placement != RESIDENT]
GRID = [
    Case(*choices) for choices in product(PLACEMENTS, OPTIMIZERS, ACCUMULATIONS, ADAPTERS, STAGES)
]
# Every placement at two stages, every optimizer twice; all of them are in
# benchmarks/placement_equal.py.
FEW = [
    Case(
        AWAY[number % 4],
        OPTIMIZERS[(number + number // 4) % 4],
        ACCUMULATIONS[number % 2],
        "lora" if number in (1, 6) else "full",
        STAGES[(number + number // 4 * 2) % 4],
    )
    for number in range(8)
]
# Against one rank, which adds gradients up in another order: of norms, relative; of parameters, the
# mean and the largest difference. Lion takes the sign of what may be nearly nothing, and then a
# parameter moves two learning rates elsewhere. Blocks of 8-bit moments begin elsewhere in shards,
# and so other values share a scale; next to what parameters have moved, that is a hundredth.
EXACT = (5e-6, 1e-6, 1e-5)
TOLERANCES = {
    OptimizerName.ADAMW: EXACT,
    OptimizerName.SGD: EXACT,
    OptimizerName.LION: (1e-3, 0.1 * LEARNING_RATE, MICRO_BATCHES * 2 * LEARNING_RATE),
    OptimizerName.ADAMW_8BIT: (5e-3, 0.2 * LEARNING_RATE, 4 * LEARNING_RATE),
}

Record = Callable[[str, object], None]


def make_runs(folder: Path, micro_batches: int, cases: Sequence[Case]) -> Path:
    """The folder with the results of all cases."""
    root = str(PROGRAM.parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, str(micro_batches), *map(str, cases)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of some cases have left their results."""
    return make_runs(tmp_path_factory.mktemp("few"), FEW_MICRO_BATCHES, FEW)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of all cases have left their results."""
    return make_runs(tmp_path_factory.mktemp("grid"), MICRO_BATCHES, GRID)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_placement_on_ranks_changes_nothing(few: Path, case: Case) -> None:
    judge(json.loads((few / f"{case}.json").read_text()), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_no_combination_on_ranks_changes_anything(
    grid: Path, case: Case, record_property: Record
) -> None:
    """All of them, for `benchmarks/placement_equal.py --ranks 2`."""
    found = json.loads((grid / f"{case}.json").read_text())
    for name, value in found.items():
        record_property(name, value)
    judge(found, case)


def judge(found: dict[str, Any], case: Case) -> None:
    """The bits of resident ranks, and what one rank gives."""
    assert found["equal"] or case.adds_up_elsewhere
    tolerances = TOLERANCES[case.optimizer]
    if case.adapter == "lora" and case.optimizer is OptimizerName.ADAMW_8BIT:
        tolerances = EXACT  # adapters of this size have 32-bit moments
    for name, tolerance in zip(("norms", "mean", "largest"), tolerances, strict=True):
        assert found[name] <= tolerance, name
