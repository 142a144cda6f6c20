"""trainer_log.jsonl and the records in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tightfit.monitor.log import TrainerLog
from tightfit.monitor.records import EvaluationRecord, StepRecord


def record(step: int = 1, **given: Any) -> StepRecord:
    fields = {
        "epoch": 0.5, "loss": 2.0, "learning_rate": 1e-4, "grad_norm": 1.0, "tokens": 100,
        "seconds": 0.5, "device_bytes": None, "device_peak_bytes": 7,
    }  # fmt: skip
    return StepRecord(step=step, **(fields | given))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_records_are_written_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = TrainerLog(path, every_steps=1)
    assert not path.exists()
    log.evaluation(EvaluationRecord(step=0, loss=3.0, seconds=1.0))
    log.step(record(1))
    written = lines(path)
    assert written[0] == {"event": "evaluation", "step": 0, "loss": 3.0, "seconds": 1.0}
    assert written[1]["event"] == "step"
    assert written[1]["device_bytes"] is None
    TrainerLog(path, every_steps=1).step(record(2))
    assert [line["step"] for line in lines(path)] == [0, 1, 2], "a resumed run appends"


def test_only_steps_that_are_due_and_all_that_were_skipped(tmp_path: Path) -> None:
    log = TrainerLog(tmp_path / "log.jsonl", every_steps=4)
    for step in range(1, 9):
        log.step(record(step, skipped=step == 3))
    log.evaluation(EvaluationRecord(step=7, loss=1.0, seconds=1.0))
    assert [line["step"] for line in lines(tmp_path / "log.jsonl")] == [3, 4, 8, 7]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    log = TrainerLog(tmp_path / "log.jsonl", every_steps=1)
    log.step(record(loss=value, grad_norm=value, skipped=True))
    log.evaluation(EvaluationRecord(step=1, loss=value, seconds=1.0))
    step, evaluation = lines(tmp_path / "log.jsonl")
    assert (step["loss"], step["grad_norm"], evaluation["loss"]) == (None, None, None)
    assert step["learning_rate"] == 1e-4


def test_tokens_per_second() -> None:
    assert record(tokens=100, seconds=0.5).tokens_per_second == 200
