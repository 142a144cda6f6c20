"""The page of benchmarks/step_time.py is that of what it has measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name

from step_time import RESULTS, RUNS, page  # noqa: E402


def test_page_is_that_of_the_results() -> None:
    results = json.loads((RESULTS / "step_time.json").read_text(encoding="utf-8"))
    assert (RESULTS / "step_time.md").read_text(encoding="utf-8") == page(results)
    assert [(run["name"], run["ranks"]) for run in results["runs"]] == [
        (run.name, run.ranks) for run in RUNS
    ]
    assert {run["ranks"] for run in results["runs"]} == {1, 2, 4}
