"""What the rounds of a benchmark say: step times as ratios of turns in the same round, and aims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

SAME_LOSS = 1e-4

Rounds = list[list[dict[str, float]]]
Measured = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """A figure of each round."""

    values: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.values)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({min(self.values):.2f} - {max(self.values):.2f})"


def step_seconds(turn: list[dict[str, float]]) -> float:
    """A step's, from its beginning to its end."""
    return mean([step["forward"] + step["backward"] + step["step"] for step in turn])


def processor_seconds(turn: list[dict[str, float]]) -> float:
    """What a rank has computed in a step."""
    return mean([step["processor"] for step in turn])


def step_ratio(
    one: Measured,
    other: Measured,
    seconds: Callable[[list[dict[str, float]]], float] = step_seconds,
) -> Spread:
    """Step times, or other seconds, by rounds, which both have had."""
    pairs = zip(one["rounds"], other["rounds"], strict=False)
    return Spread(tuple(seconds(mine) / seconds(theirs) for mine, theirs in pairs))


def typical(measured: Measured, phase: str) -> float:
    """Seconds of a phase of a step, the median of all steps."""
    rounds: Rounds = measured["rounds"]
    return median(step[phase] for turn in rounds for step in turn)


@dataclass(frozen=True)
class Aim:
    """Something that was promised."""

    what: str
    limit: str
    found: str
    reached: bool


def same_losses(where: str, ran: Mapping[str, Measured], reference: str) -> Aim:
    """Whether everybody has trained the same, as far as all went."""
    plain = ran[reference]["losses"]
    worst = max(
        abs(mine / theirs - 1)
        for measured in ran.values()
        for ours, others in zip(measured["losses"], plain, strict=True)
        for mine, theirs in zip(ours, others, strict=False)
    )
    what = f"{where}: largest relative difference of a loss to {reference}"
    return Aim(what, f"at most {SAME_LOSS:.0e}", f"{worst:.1e}", worst <= SAME_LOSS)
