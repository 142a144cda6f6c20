"""A sample of benchmarks/accuracy.py's grid is run again, and its design and page are checked.

The bill claims to be at most 3% above what a real run takes and never below, in every phase.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import pytest
from tests.taken import every

from tightfit.policies import Tier

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name

from accuracy_grid import LEVELS, Row, allowed, grid  # noqa: E402
from accuracy_page import PAGE, page  # noqa: E402
from accuracy_results import GRID, Result, read_grid  # noqa: E402
from accuracy_runs import run_row  # noqa: E402

SAMPLED = [(1, 0), (1, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)]


def sample() -> list[Row]:
    """Rows of the grid for these ranks, small models in turn."""
    small = [row for row in grid() if row.model != "SmolLM2-135M"]
    rows: list[Row] = []
    for ranks in SAMPLED:
        left = [row for row in small if row.ranks == ranks and row not in rows]
        taken = [row.model for row in rows]
        rows.append(min(left, key=lambda row: (taken.count(row.model), row.micro_batch)))
    return rows


@pytest.mark.parametrize("row", every(3, sample()), ids=lambda row: f"{row.model}, {row.sharing}")
def test_bill_is_what_a_real_run_takes(row: Row) -> None:
    result = Result(row, run_row(row))
    assert result.ran.measured.peak_bytes(Tier.DEVICE) > 0
    assert result.holds, result.totals


def test_every_pair_of_settings_is_in_some_row() -> None:
    rows = grid()
    assert rows == grid(), "the design is the same every time"
    assert len(set(rows)) == len(rows)
    assert all(allowed(asdict(row)) for row in rows)
    seen = {pair for row in rows for pair in combinations(sorted(asdict(row).items()), 2)}
    for one, other in combinations(sorted(LEVELS), 2):
        for first in LEVELS[one]:
            for second in LEVELS[other]:
                pair = ((one, first), (other, second))
                assert pair in seen or not allowed(dict(pair))


def test_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert GRID.exists()
    _, results = read_grid()
    assert [result.row for result in results] == grid()
    assert all(result.holds for result in results)
