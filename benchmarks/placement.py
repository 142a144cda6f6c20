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
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from placement_contenders import PLAIN
from placement_disk import stream
from placement_page import page
from placement_setting import Setting
from placement_workers import CONTENDERS, Failed, Runner, forked

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
STEPS = 2  # of a turn, timed
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
    names = [name for name in CONTENDERS if arguments.only in name or name == PLAIN]
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
                "contenders": run(setting, names, second * setting.share, rounds, folder),
            }
            for setting in settings
        ],
        "disk": stream_beside(
            folder, QUICK_BYTES if arguments.quick else STREAMED_BYTES, STREAM_ROUNDS
        ),
    }


def versions() -> dict[str, str]:
    """Of what is compared."""
    found = {"Python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> str:
    """Its name, where Linux says it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(": ")[1]
    return platform.machine()


def run(
    setting: Setting, names: list[str], seconds: float, rounds: int, folder: Path
) -> dict[str, Any]:
    """What was measured of each contender, or why not."""
    begin = perf_counter()
    here = Contest(
        {
            name: Runner(name, setting, folder / f"{setting.name} {number}")
            for number, name in enumerate(names)
        }
    )
    here.ask_all("start")
    started = perf_counter()
    here.take_turns(seconds, rounds)
    turned = perf_counter()
    for key in ("memory", "losses"):
        for name, answers in here.ask_all(key).items():
            here.results[name][key] = answers
    here.end()
    done = max(len(result.get("rounds", ())) for result in here.results.values())
    say(
        f"{setting.name}: start {started - begin:.0f} s, {done} rounds {turned - started:.0f} s, "
        f"memory {perf_counter() - turned:.0f} s"
    )
    return here.results


class Contest:
    """Contenders in one setting; who fails is out, with the reason as the result."""

    def __init__(self, runners: dict[str, Runner]) -> None:
        self._runners = runners
        self.results: dict[str, Any] = {name: {"rounds": []} for name in runners}

    def ask_all(self, command: str) -> dict[str, list[Any]]:
        """The answers of all that have one, who work on it at the same time."""
        for runner in self._runners.values():
            runner.begin(command)
        answers = {name: self._answers(name) for name in list(self._runners)}
        return {name: given for name, given in answers.items() if given is not None}

    def _answers(self, name: str) -> list[Any] | None:
        try:
            return self._runners[name].answers()
        except Failed as failure:
            say(f"{name}: {failure}")
            self.results[name] = {"failed": str(failure)}
            self._runners.pop(name).end()
            return None

    def take_turns(self, seconds: float, fewest: int) -> None:
        """Rounds in which each contender has a turn, each time another one first."""
        end = perf_counter() + seconds
        number = 0
        while number < fewest or perf_counter() < end:
            names = list(self._runners)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self._runners[name].begin("turn", STEPS)
                ranks = self._answers(name)
                if ranks is not None:
                    steps = [mean_step(step) for step in zip(*ranks, strict=True)]
                    self.results[name]["rounds"].append(steps)
            number += 1

    def end(self) -> None:
        """Let all processes go."""
        for runner in self._runners.values():
            runner.end()


def mean_step(ranks: tuple[dict[str, float], ...]) -> dict[str, float]:
    """A step's seconds, the mean over ranks: one that waits for another does so in any phase."""
    return {key: round(sum(rank[key] for rank in ranks) / len(ranks), 5) for key in ranks[0]}


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


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
