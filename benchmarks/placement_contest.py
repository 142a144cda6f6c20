"""Contenders of a benchmark in turns, and what they ran on.

All of a setting are there at once and take turns of a few steps, so that whatever else the machine
does is in both of two turns in the same round. Memory is measured afterwards, in steps that are not
timed. Knows nothing of what is compared.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from placement_contenders import Contender
from placement_setting import Setting
from placement_workers import Failed, Runner

STEPS = 2  # of a turn, timed


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
    setting: Setting, contenders: Sequence[Contender], seconds: float, rounds: int, folder: Path
) -> dict[str, Any]:
    """What was measured of each contender, or why not.

    Args:
        seconds: of turns.
        rounds: at least as many, whatever they take.
    """
    begin = perf_counter()
    here = Contest(
        {
            contender.name: Runner(contender, setting, folder / f"{setting.name} {number}")
            for number, contender in enumerate(contenders)
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


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
