"""ZeRO stages side by side with DeepSpeed and with scripts of DDP and FSDP2; writes
benchmarks/results/sharding.json and sharding.md.

    PATH=PEERS/bin:$PATH PEERS/bin/python benchmarks/sharding.py
    python benchmarks/sharding.py --page_only

PEERS is an environment with tightfit and DeepSpeed, as placement_peers.py says how to make. In each
mode its contenders take turns, as placement_contest.py says, each rank with one thread.

Takes ten minutes on an idle machine. `--only "2 ranks, ZeRO-3"` measures that again and keeps the
rest of the results; nothing is kept with --quick.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from placement_contest import run, versions
from placement_setting import Setting
from sharding_contenders import MODES
from sharding_page import machine, page

RESULTS = Path(__file__).parent / "results"
RANKS = (2, 4)
MODEL = {"hidden_size": 512, "intermediate_size": 1376, "layers": 6, "vocabulary": 4096}
SECONDS, QUICK_SECONDS = 20.0, 1.0  # of turns, in each mode
FEWEST_ROUNDS, QUICK_ROUNDS = 5, 1
NAMES = {f"{ranks} ranks, {mode.name}": (ranks, mode) for ranks in RANKS for mode in MODES}


def main() -> int:
    """Measure and write; 1 if nothing was asked for."""
    arguments = parse()
    file = RESULTS / "sharding.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    asked = [name for name in NAMES if arguments.only in name]
    if not asked:
        print(f"no mode has {arguments.only!r} in its name", file=sys.stderr)
        return 1
    for name in () if arguments.page_only else asked:
        result = measure(name, arguments)
        if arguments.quick:
            print(page([result]))
            continue
        results = merged(results, result)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        (RESULTS / "sharding.md").write_text(page(results), encoding="utf-8")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, printed")
    parser.add_argument("--page_only", action="store_true", help="from sharding.json")
    parser.add_argument("--only", default="", help="modes whose name has this in it")
    parser.add_argument("--folder", default="/var/tmp", help="for the ranks' logs")
    return parser.parse_args()


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured in a mode."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ranks, mode = NAMES[name]
    setting = Setting(name, ranks, **MODEL)
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    rounds = QUICK_ROUNDS if arguments.quick else FEWEST_ROUNDS
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="sharding-"))
    try:
        return {
            **asdict(setting),
            "mode": mode.name,
            "date": str(date.today()),
            "versions": versions(),
            "machine": machine(),
            "contenders": run(setting, (mode.ours, *mode.peers), seconds, rounds, folder),
        }
    finally:
        shutil.rmtree(folder)


def merged(results: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """With a new one in place of the one that it repeats, in the order of a whole run."""
    by_name = {result["name"]: result for result in (*results, new)}
    return [by_name[name] for name in NAMES if name in by_name]


if __name__ == "__main__":
    sys.exit(main())
