"""Placements side by side with peers; writes benchmarks/results/placement.json and placement.md.

    PATH=PEERS/bin:$PATH PEERS/bin/python benchmarks/placement.py
    python benchmarks/placement.py --page_only

PEERS is an environment with tightfit and DeepSpeed, as placement_peers.py says how to make; what
is not there is reported as such. Takes nine minutes, with --quick under two and nothing is kept.

In each setting all contenders are there at once and take turns of a few steps; a ratio is of two
turns in the same round, so that whatever else the machine does is in both. Rounds go on until the
setting's share of the time is used up. Memory is measured afterwards, in steps that are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from placement_contenders import OURS, PLAIN
from placement_contest import processor, run, say, versions
from placement_disk import stream
from placement_page import page
from placement_peers import PEERS
from placement_setting import Setting
from placement_workers import forked

RESULTS = Path(__file__).parent / "results"
SETTINGS = (
    Setting("small, 1 rank", ranks=1),
    Setting("small, 2 ranks", ranks=2, share=1.5, also_quick=False),
    Setting("larger, 1 rank", 1, 640, 1728, 10, share=1.5, also_quick=False),
    Setting("waiting, 1 rank", 1, sequences=1, length=16, waits_seconds=(0.03, 0.04)),
    Setting(
        "waiting, 2 ranks", 2, sequences=1, length=16, waits_seconds=(0.03, 0.04), also_quick=False
    ),
)
MINUTES, QUICK_MINUTES = 5.0, 0.5  # of turns; starts and memory come on top
FEWEST_ROUNDS, QUICK_ROUNDS = 3, 1
STREAMED_BYTES, QUICK_BYTES = 3 * 2**29, 3 * 2**27
STREAM_ROUNDS = 7


def main() -> int:
    """Measure and write; 1 if nothing could run at all."""
    arguments = parse()
    if not arguments.page_only:
        os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="placement-"))
        try:
            results = measure(arguments, folder)
        finally:
            shutil.rmtree(folder)
        if arguments.quick:
            print(page(results))
            return 0
        text = json.dumps(results, indent=1) + "\n"
        (RESULTS / "placement.json").write_text(text, encoding="utf-8")
    results = json.loads((RESULTS / "placement.json").read_text(encoding="utf-8"))
    (RESULTS / "placement.md").write_text(page(results), encoding="utf-8")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer settings and rounds, printed")
    parser.add_argument("--page_only", action="store_true", help="from placement.json")
    parser.add_argument("--minutes", type=float, help="of timed turns, over all settings")
    parser.add_argument("--only", default="", help="contenders whose name has this in it")
    parser.add_argument("--settings", default="", help="settings whose name has this in it")
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to stream to")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All settings, then the disk."""
    settings = [
        setting
        for setting in SETTINGS
        if (setting.also_quick or not arguments.quick) and arguments.settings in setting.name
    ]
    contenders = [
        contender
        for contender in (*OURS, *PEERS)
        if arguments.only in contender.name or contender.name == PLAIN
    ]
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    second = 60 * minutes / sum(setting.share for setting in settings)
    rounds = QUICK_ROUNDS if arguments.quick else FEWEST_ROUNDS
    return {
        "date": str(date.today()),
        "versions": versions(),
        "machine": f"{os.cpu_count()} x {processor()}, one thread per rank",
        "settings": [
            {
                **asdict(setting),
                "contenders": run(setting, contenders, second * setting.share, rounds, folder),
            }
            for setting in settings
        ],
        "disk": stream_beside(
            folder, QUICK_BYTES if arguments.quick else STREAMED_BYTES, STREAM_ROUNDS
        ),
    }


def stream_beside(folder: Path, total_bytes: int, rounds: int) -> dict[str, Any]:
    """`stream` in a process of its own."""
    say("disk")
    with ProcessPoolExecutor(1, mp_context=forked()) as pool:
        result: dict[str, Any] = pool.submit(_stream, folder / "disk", total_bytes, rounds).result()
        return result


def _stream(folder: Path, total_bytes: int, rounds: int) -> dict[str, Any]:
    from placement_workers import join, say_into

    folder.mkdir()
    say_into(folder / "log")
    join(0, 1, folder / "store")
    return stream(folder, total_bytes, rounds)


if __name__ == "__main__":
    sys.exit(main())
