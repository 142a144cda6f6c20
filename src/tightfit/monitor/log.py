"""trainer_log.jsonl: one JSON object per line, flushed as it is written.

JSON knows no infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
from pathlib import Path

from tightfit.facts.disk import writing
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord


class TrainerLog:
    """Appends records to a file, every `every_steps` steps.

    Raises:
        TrainingError: out of its methods, where the file cannot be written.
    """

    def __init__(self, path: Path, every_steps: int) -> None:
        self._path = path
        self._every_steps = every_steps

    def step(self, record: StepRecord) -> None:
        """Write a step's record if it is due; skipped steps are always due."""
        if record.step % self._every_steps == 0 or record.skipped:
            self._write({"event": "step", **record.to_json()})

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write an evaluation's record."""
        self._write({"event": "evaluation", **record.to_json()})

    def changed(self, change: PlanChange) -> None:
        """Write which plan the run goes on with, and why."""
        self._write({"event": "plan", **change.to_json()})

    def _write(self, content: dict[str, object]) -> None:
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content, allow_nan=False) + "\n")
