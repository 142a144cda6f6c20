"""Every placement x optimizer x accumulation x {full, LoRA}: 20 steps, the resident run's bits.

Runs the slow tests of `tests/engine/test_placement.py`, in which copies arrive as late as they may
and poison until then, and counts what they found.

    python benchmarks/placement_equal.py > benchmarks/results/placement_equal.md
    python benchmarks/placement_equal.py --ranks 2 > benchmarks/results/placement_equal_2_ranks.md

With two ranks, which are processes on gloo, it is `tests/engine/test_placement_on_ranks.py`, at
every ZeRO stage. Each takes five to ten minutes on two cores.
"""

from __future__ import annotations

import argparse
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
ONE_RANK, TWO_RANKS = "tests/engine/test_placement.py", "tests/engine/test_placement_on_ranks.py"
CASE = re.compile(r"test_no_combination\w*_changes_anything\[(.+)-(\w+)-(\d+)-(\w+?)(?:-(\d))?\]")
Found = dict[tuple[str, str], list[bool]]
Figures = dict[tuple[str, str, str], list[dict[str, str]]]


def main() -> int:
    """Run them and print the table; 1 if any run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    ranks = parser.parse_args().ranks
    found: Found = defaultdict(list)
    figures: Figures = defaultdict(list)
    for case in run(ONE_RANK if ranks == 1 else TWO_RANKS):
        match = CASE.fullmatch(case.get("name", ""))
        assert match is not None, case.get("name")
        placement, optimizer, _, adapter, stage = match.groups()
        is_right = case.find("failure") is None and case.find("error") is None
        found[placement, optimizer].append(is_right)
        properties = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        if properties:
            figures[optimizer, adapter, "0" if stage == "0" else "1-3"].append(properties)
    print_head(ranks)
    print_table(found)
    if figures:
        print_figures(figures)
    return 0 if found and all(all(equal) for equal in found.values()) else 1


def run(test: str) -> list[ElementTree.Element]:
    """What the slow tests of a file have found."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "slow", test, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *options]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        return list(ElementTree.parse(report).iter("testcase"))


def print_head(ranks: int) -> None:
    """What was run with what, and what a cell of the table says."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    made = (
        f"Made by `benchmarks/placement_equal.py{' --ranks 2' if ranks == 2 else ''}` on "
        f"{date.today()}, Python {platform.python_version()}, {libraries}."
    )
    if ranks == 1:
        print("# Placed runs that equal the resident run bit for bit\n")
        print(
            f"{made} Each cell: runs of 20 steps whose losses, gradient norms and parameters are "
            "all equal, of those with 1 and 4 micro-batches, full and LoRA, clipping on, fp32, one "
            "rank.\n"
        )
        return
    print("# Placed runs on two ranks that equal resident ranks, and one rank\n")
    print(
        f"{made} Each cell: runs of 20 micro-batches per rank (20 steps of one, or 5 of 4), full "
        "and LoRA, at ZeRO stages 0 to 3, clipping on, fp32, two processes on gloo, of which\n\n"
        "- losses, gradient norms and parameters are, bit for bit and on both ranks, those of "
        "resident training on two ranks. One thing adds up in another order and is held against "
        "one rank only: at stage 0, several micro-batches whose gradients leave the device, as "
        "each is then summed over ranks by itself;\n"
        "- norms and parameters are those of one rank that takes the same micro-batches one after "
        "the other, within the tolerances of `tests/engine/test_placement_on_ranks.py`. How far "
        "they are is the second table.\n"
    )


def print_table(found: Found) -> None:
    """How many of the runs of each placement and optimizer are equal."""
    placements = list(dict.fromkeys(placement for placement, _ in found))
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in found))
    print(f"| placement | {' | '.join(optimizers)} |")
    print("|---" * (1 + len(optimizers)) + "|")
    for placement in placements:
        cells = [found[placement, optimizer] for optimizer in optimizers]
        print(f"| {placement} | {' | '.join(f'{sum(c)} of {len(c)}' for c in cells)} |")


def print_figures(figures: Figures) -> None:
    """How far two ranks are from one."""
    print(
        "\nTwo ranks against one: the largest relative difference of a norm, the mean and the "
        "largest difference of a parameter, in the worst of the runs. Learning rate 0.003. Sums "
        "in another order change last bits; Lion takes the sign of what may be nearly nothing, and "
        "a parameter whose sign turns moves two learning rates elsewhere; blocks of 8-bit moments "
        "begin elsewhere in shards (not in LoRA's adapters, which are too small for 8 bits).\n"
    )
    print("| optimizer | trained | stage | bitwise resident ranks | norm | mean | largest |")
    print("|---|---|---|---|---|---|---|")
    for (optimizer, adapter, stages), runs in figures.items():
        equal = sum(run["equal"] == "True" for run in runs)
        worst = [max(float(run[name]) for run in runs) for name in ("norms", "mean", "largest")]
        cells = " | ".join(f"{value:.1e}" for value in worst)
        print(f"| {optimizer} | {adapter} | {stages} | {equal} of {len(runs)} | {cells} |")


if __name__ == "__main__":
    sys.exit(main())
