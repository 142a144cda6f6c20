"""What the grid and the other estimators have left behind, and how far off each of them is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy_grid import Row
from accuracy_runs import Outcome
from tightfit.bill.table import Difference, Kind
from tightfit.policies import Tier

FOLDER = Path(__file__).parent / "results"
GRID = FOLDER / "accuracy.json"
PEERS = FOLDER / "accuracy_peers.json"

ALLOWED_ERROR = 0.03


@dataclass(frozen=True)
class Result:
    """A row of the grid and what came of it; `outcome` is None where it failed."""

    row: Row
    outcome: Outcome | None
    failed: str = ""

    @property
    def ran(self) -> Outcome:
        """The outcome of a row that did not fail."""
        assert self.outcome is not None, self.failed
        return self.outcome

    @property
    def totals(self) -> list[Difference]:
        """Every phase and tier, predicted with its margin."""
        return _totals(self.ran.predicted.diff(self.ran.measured))

    @property
    def is_exact(self) -> bool:
        """Whether all of them are right to the byte without it."""
        totals = _totals(self.ran.exact.diff(self.ran.measured))
        return all(total.predicted_bytes == total.measured_bytes for total in totals)

    @property
    def peaks_bytes(self) -> tuple[int, int]:
        """The device's peak as predicted and as measured."""
        return tuple(  # type: ignore[return-value]
            table.peak_bytes(Tier.DEVICE) for table in (self.ran.predicted, self.ran.measured)
        )

    @property
    def error(self) -> float:
        """Of the device's peak."""
        predicted, measured = self.peaks_bytes
        return predicted / measured - 1

    @property
    def span(self) -> tuple[float, float]:
        """The lowest and the highest error of all phases and tiers."""
        errors = [error_of(total) for total in self.totals]
        return min(errors), max(errors)

    @property
    def holds(self) -> bool:
        """Whether no phase and tier is below what was measured, or too far above it."""
        return self.outcome is not None and all(map(total_holds, self.totals))


def _totals(differences: list[Difference]) -> list[Difference]:
    return [difference for difference in differences if difference.kind is None]


def error_of(total: Difference) -> float:
    """Infinite where something was predicted and nothing was there."""
    return float("inf") if total.error is None else total.error


def total_holds(total: Difference) -> bool:
    """Never below, and at most so far above."""
    return 0 <= error_of(total) <= ALLOWED_ERROR


@dataclass(frozen=True)
class Guess:
    """How far off an estimate is, and what it took to make."""

    error: float
    seconds: float


@dataclass(frozen=True)
class Peer:
    """Another estimator's answers.

    Attributes:
        guesses: by name of the set of rows: those it says it is for, and all that it answers.
        failed: rows that it should know and fails on.
    """

    name: str
    guesses: dict[str, list[Guess]]
    failed: int


def read_grid() -> tuple[dict[str, Any], list[Result]]:
    """What the grid has left: its circumstances and its rows."""
    data = json.loads(GRID.read_text(encoding="utf-8"))
    return data, [_result(entry) for entry in data.pop("rows")]


def _result(entry: dict[str, Any]) -> Result:
    row = Row.from_json(entry["row"])
    if "failed" in entry:
        return Result(row, None, entry["failed"])
    return Result(row, Outcome.from_json(entry))


def read_peers(results: list[Result]) -> tuple[dict[str, Any], list[Peer]]:
    """What the other estimators have left: their circumstances and their answers."""
    data = json.loads(PEERS.read_text(encoding="utf-8"))
    measured = {result.row: result for result in results if result.outcome is not None}
    rows = [measured.get(Row.from_json(row)) for row in data.pop("rows")]
    peers = [
        _peer(name, list(zip(answers, rows, strict=True)))
        for name, answers in data.pop("estimates").items()
    ]
    return data, peers


def _peer(name: str, answers: list[tuple[dict[str, Any] | None, Result | None]]) -> Peer:
    given = [
        (answer, result) for answer, result in answers if answer is not None and result is not None
    ]
    failed = sum("failed" in answer for answer, _ in given)
    guesses = [
        (answer["described"], Guess(_peer_error(answer, result), answer["seconds"]))
        for answer, result in given
        if "failed" not in answer
    ]
    described = [guess for is_described, guess in guesses if is_described]
    sets = {"described": described, "all answered": [guess for _, guess in guesses]}
    if len(described) == len(guesses):
        del sets["all answered"]
    return Peer(name, sets, failed)


def _peer_error(answer: dict[str, Any], result: Result) -> float:
    """Against the device's peak, or against what lives of the kinds that the peer counts."""
    measured = result.ran.measured
    if not answer["kinds"]:
        return float(answer["bytes"] / measured.peak_bytes(Tier.DEVICE) - 1)
    counted = [Kind(kind) for kind in answer["kinds"]]
    living = max(
        sum(tiers.get(Tier.DEVICE, {}).get(kind, 0) for kind in counted)
        for tiers in measured.peaks.values()
    )
    return float(answer["bytes"] / living - 1)


def faults() -> Iterator[Result]:
    """Rows that do not hold."""
    return (result for result in read_grid()[1] if not result.holds)
