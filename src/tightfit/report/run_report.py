"""report.json: what a run predicted, what it measured, and how far apart they are.

Knows a run by its plan and its records only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tightfit.bill.table import Difference, MemoryTable
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Plan
from tightfit.policies import Tier

_SECONDS_PER_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class RunReport:
    """A finished run laid beside its plan."""

    plan: Plan
    measured: MemoryTable
    records: Sequence[StepRecord]
    evaluations: Sequence[EvaluationRecord]
    answers: Sequence[str]

    def differences(self) -> list[Difference]:
        """Predicted beside measured, for every phase that either knows."""
        return self.plan.bill.diff(self.measured)

    def peak_error(self) -> float:
        """(predicted - measured) / measured of the device peak."""
        measured = self.measured.peak_bytes(Tier.DEVICE)
        return (self.plan.bill.peak_bytes(Tier.DEVICE) - measured) / measured

    def step_seconds(self) -> float | None:
        """Median seconds of the steps after the first, or of the only one."""
        steps = list(self.records[1:] or self.records)
        return median(record.seconds for record in steps) if steps else None

    def communication_share(self) -> float | None:
        """Median part of a step that rank 0 waited for others in, of the same steps."""
        steps = list(self.records[1:] or self.records)
        return median(record.communication_share for record in steps) if steps else None

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
            "nvme_written_bytes": {
                "step": self.nvme_written_bytes(),
                "day": round(self.nvme_written_bytes_per_day()),
            },
            "steps": [record.to_json() for record in self.records],
            "evaluations": [record.to_json() for record in self.evaluations],
            "answers": list(self.answers),
        }

    def write(self, path: Path) -> None:
        """Write report.json."""
        path.write_text(
            json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )


def _difference_json(row: Difference) -> dict[str, object]:
    return {
        "phase": str(row.phase),
        "tier": str(row.tier),
        "kind": None if row.kind is None else str(row.kind),
        "predicted_bytes": row.predicted_bytes,
        "measured_bytes": row.measured_bytes,
        "error": row.error,
    }
