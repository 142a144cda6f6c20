"""Every placement x optimizer x accumulation x {full, LoRA}: 20 steps, the resident run's bits.

Runs the slow tests of `tests/engine/test_placement.py`, in which copies arrive as late as they may
and poison until then, and counts what they found.

    python benchmarks/placement_equal.py > benchmarks/results/placement_equal.md

Takes about ten minutes on one core.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEST = "tests/engine/test_placement.py"
CASE = re.compile(r"test_no_combination_changes_anything\[(.+)-(\w+)-(\d+)-(\w+)\]")


def main() -> int:
    """Run them and print the table; 1 if any run differs."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "slow", TEST, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for case in cases:
        match = CASE.fullmatch(case.get("name", ""))
        assert match is not None, case.get("name")
        found[match[1], match[2]].append(
            case.find("failure") is None and case.find("error") is None
        )
    print_table(found)
    return 0 if all(all(equal) for equal in found.values()) else 1


def print_table(found: dict[tuple[str, str], list[bool]]) -> None:
    """How many of the runs of each placement and optimizer are equal."""
    placements = list(dict.fromkeys(placement for placement, _ in found))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in found))
    print("# Placed runs that equal the resident run bit for bit\n")
    print(
        f"Made by `benchmarks/placement_equal.py` on {date.today()}, Python "
        f"{platform.python_version()}, torch {version('torch')}, transformers "
        f"{version('transformers')}, peft {version('peft')}. Each cell: runs of 20 steps whose "
        "losses, gradient norms and parameters are all equal, of those with 1 and 4 micro-batches, "
        "full and LoRA, clipping on, fp32, one rank.\n"
    )
    print(f"| placement | {' | '.join(optimizers)} |")
    print("|---" * (1 + len(optimizers)) + "|")
    for placement in placements:
        cells = [found[placement, optimizer] for optimizer in optimizers]
        print(f"| {placement} | {' | '.join(f'{sum(c)} of {len(c)}' for c in cells)} |")


if __name__ == "__main__":
    sys.exit(main())
