"""Bills beside real runs, for a grid of jobs; writes docs/accuracy.md.

    python benchmarks/accuracy.py                 # run the grid, then write the page
    python benchmarks/accuracy.py --faults_only   # run again what did not hold, keep the others
    python benchmarks/accuracy_peers.py           # ask other estimators about the same jobs
    python benchmarks/accuracy.py --page_only     # write the page from what both have left

What was measured is kept in benchmarks/results/accuracy.json. Takes 16 minutes on two busy cores
and up to 6 GiB. Returns 1 if a bill is below what was measured or more than 3% above it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from time import perf_counter
from typing import Any

from accuracy_grid import Row, grid
from accuracy_page import write_page
from accuracy_results import GRID, faults
from accuracy_runs import run_row

BIG = "SmolLM2-135M"
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if a bill does not hold."""
    parser = argparse.ArgumentParser(description="bills beside real runs, for a grid of jobs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--page_only", action="store_true", help="from what was measured before")
    what.add_argument("--faults_only", action="store_true", help="run rows that do not hold again")
    chosen = parser.parse_args(arguments)
    if not chosen.page_only:
        kept = results_that_hold() if chosen.faults_only else {}
        run_grid(kept)
    write_page()
    return 1 if any(faults()) else 0


def results_that_hold() -> dict[Row, dict[str, Any]]:
    """What was kept of rows that hold."""
    entries = json.loads(GRID.read_text(encoding="utf-8"))["rows"]
    found = {Row.from_json(entry["row"]): entry for entry in entries}
    for result in faults():
        del found[result.row]
    return found


def run_grid(kept: dict[Row, dict[str, Any]]) -> None:
    """Run all rows but those that were kept, and keep what came out of them."""
    start = perf_counter()
    rows = grid()
    missing = [row for row in rows if row not in kept]
    with ThreadPoolExecutor(2) as lanes:  # big models one after the other, small ones beside them
        big = lanes.submit(_run_all, [row for row in missing if row.model == BIG])
        small = lanes.submit(_run_all, [row for row in missing if row.model != BIG])
        found = {**kept, **big.result(), **small.result()}
    results = {
        "date": str(date.today()),
        "machine": f"Python {platform.python_version()}, {platform.machine()}",
        "versions": {name: version(name) for name in PACKAGES},
        "cores": os.cpu_count(),
        "rows": [found[row] for row in rows],
    }
    GRID.parent.mkdir(exist_ok=True)
    GRID.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(f"{(perf_counter() - start) / 60:.0f} minutes", file=sys.stderr)


def _run_all(rows: list[Row]) -> dict[Row, dict[str, Any]]:
    return {row: _run(row) for row in rows}


def _run(row: Row) -> dict[str, Any]:
    start = perf_counter()
    result: dict[str, Any]
    try:
        result = run_row(row).to_json()
    except Exception as error:  # noqa: BLE001  # one row that fails is a row of the table
        traceback.print_exception(error)
        result = {"failed": f"{type(error).__name__}: {error}"}
    print(f"{perf_counter() - start:5.1f} s  {row}", file=sys.stderr, flush=True)
    return {"row": asdict(row), "seconds": round(perf_counter() - start, 1), **result}


if __name__ == "__main__":
    sys.exit(main())
