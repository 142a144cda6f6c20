"""The page of benchmarks/modes.py is that of what it has measured, all of which is within."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name

from modes_page import FIRST_STEP_BF16, is_within, long_page, short_table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STORED = json.loads((RESULTS / "modes.json").read_text(encoding="utf-8"))


def test_pages_are_those_of_the_results() -> None:
    assert (RESULTS / "modes.md").read_text(encoding="utf-8") == long_page(STORED)
    assert short_table(STORED) in (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")


def test_every_run_is_within() -> None:
    assert [row for row in STORED["rows"] if not is_within(row)] == []


@pytest.mark.parametrize(
    ("what", "most"), list(zip(("loss", "norm"), FIRST_STEP_BF16, strict=True))
)
def test_the_first_step_in_16_bits_is_judged_by_itself(what: str, most: float) -> None:
    """A tolerance that later steps would keep."""
    row = next(row for row in STORED["rows"] if row["beside"] == "bf16")
    assert not is_within(row | {f"step_1_{what}": 1.01 * most})
    assert is_within(row | {f"step_1_{what}": 0.99 * most})
