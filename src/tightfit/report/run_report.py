"""report.json: what a run predicted, what it measured, and how far apart they are.

Knows a run by its plan and its records only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tightfit.bill.table import Difference, MemoryTable
from tightfit.facts.disk import writing
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Plan
from tightfit.policies import Tier
from tightfit.units import format_seconds

_SECONDS_PER_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class RunReport:
    """A finished run laid beside its plan.

    Attributes:
        plan: the one that it ended with, as `measured` is what was.
        records: of all steps; figures of speed are of those with that plan.
        changes: of plans on the way.
    """

    plan: Plan
    measured: MemoryTable
    records: Sequence[StepRecord]
    evaluations: Sequence[EvaluationRecord]
    answers: Sequence[str]
    changes: Sequence[PlanChange] = ()

    def differences(self) -> list[Difference]:
        """Predicted beside measured, for every phase that either knows."""
        return self.plan.bill.diff(self.measured)

    def peak_error(self) -> float:
        """(predicted - measured) / measured of the device peak."""
        measured = self.measured.peak_bytes(Tier.DEVICE)
        return (self.plan.bill.peak_bytes(Tier.DEVICE) - measured) / measured

    def step_seconds(self) -> float | None:
        """Median seconds of the steps after the first, or of the only one."""
        steps = self._own_steps()
        return median(record.seconds for record in steps) if steps else None

    def communication_share(self) -> float | None:
        """Median part of a step that rank 0 waited for others in, of the same steps."""
        steps = self._own_steps()
        return median(record.communication_share for record in steps) if steps else None

    def changes_in_words(self) -> Iterator[str]:
        """Each change of the plan that was made, with what a step takes since."""
        for change in self.changes:
            if change.failure is None:
                then = median(record.seconds for record in self._steps_after(change))
                yield (
                    f"after step {change.step} {change.what}: {format_seconds(then)} per step, "
                    f"{format_seconds(change.seconds)} before, predicted "
                    f"{format_seconds(change.predicted_seconds)}"
                )

    def _own_steps(self) -> Sequence[StepRecord]:
        """Those with the plan, without the first of several."""
        own = self._steps_after(self.changes[-1]) if self.changes else self.records
        return own[1:] or own

    def _steps_after(self, change: PlanChange) -> Sequence[StepRecord]:
        """To the next change of the plan."""
        made = [other.step for other in self.changes if other.failure is None]
        last = min((step for step in made if step > change.step), default=None)
        return [
            record
            for record in self.records
            if record.step > change.step and (last is None or record.step <= last)
        ]

    def nvme_written_bytes(self) -> int:
        """Written to the nvme tier's disk by one step; 0 where nothing is placed there."""
        return max((record.nvme_written_bytes for record in self.records), default=0)

    def nvme_written_bytes_per_day(self) -> float:
        """The same at this run's pace for a day: what the wear of a disk is rated by."""
        seconds = self.step_seconds()
        return _SECONDS_PER_DAY * self.nvme_written_bytes() / seconds if seconds else 0.0

    def to_json(self) -> dict[str, object]:
        """The content of report.json, described in docs/json.md."""
        return {
            "plan": self.plan.to_json(),
            "predicted": self.plan.bill.to_json(),
            "measured": self.measured.to_json(),
            "differences": [_difference_json(row) for row in self.differences()],
            "peak_error": self.peak_error(),
            "step_seconds": {
                "predicted": self.plan.step_time.total,
                "measured": self.step_seconds(),
            },
            "communication_share": self.communication_share(),
            "plan_changes": [change.to_json() for change in self.changes],
            "nvme_written_bytes": {
                "step": self.nvme_written_bytes(),
                "day": round(self.nvme_written_bytes_per_day()),
            },
            "steps": [record.to_json() for record in self.records],
            "evaluations": [record.to_json() for record in self.evaluations],
            "answers": list(self.answers),
        }

    def write(self, path: Path) -> None:
        """Write report.json.

        Raises:
            TrainingError: it cannot be written.
        """
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        with writing(path):
            path.write_text(text, encoding="utf-8")


def _difference_json(row: Difference) -> dict[str, object]:
    return {
        "phase": str(row.phase),
        "tier": str(row.tier),
        "kind": None if row.kind is None else str(row.kind),
        "predicted_bytes": row.predicted_bytes,
        "measured_bytes": row.measured_bytes,
        "error": row.error,
    }
