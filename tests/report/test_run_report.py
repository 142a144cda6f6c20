"""report.json: predicted beside measured, with errors that are errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Limits, Plan, StepTime
from tightfit.policies import Policies, Tier
from tightfit.report.run_report import RunReport


def table(parameters: int, activations: int) -> MemoryTable:
    kinds = {Kind.PARAMETERS: parameters, Kind.ACTIVATIONS: activations}
    return MemoryTable(
        {Phase.FORWARD: {Tier.DEVICE: kinds}, Phase.STEP: {Tier.DEVICE: {Kind.PARAMETERS: 5}}}
    )


MEASURED = table(100, 200)


def report(seconds: list[float], loss: float = 1.0, measured: MemoryTable = MEASURED) -> RunReport:
    bill = table(110, 220)
    plan = Plan(
        policies=Policies(), bill=bill, plain=bill, step_time=StepTime(1, 2, 3, 4, 5),
        limits=Limits(), trainable_parameters=1, frozen_parameters=0, reasons=(), alternatives=(),
    )  # fmt: skip
    records = [
        StepRecord(i, 0.0, loss, 0.1, 1.0, 10, s, None, None) for i, s in enumerate(seconds, 1)
    ]
    return RunReport(plan, measured, records, [EvaluationRecord(0, loss, 1.0)], ["a"])


def test_errors_are_relative_to_what_was_measured() -> None:
    made = report([1.0])
    assert made.peak_error() == pytest.approx(0.1)
    rows = {(r.phase, r.kind): r.error for r in made.differences()}
    assert rows == {
        (Phase.FORWARD, None): pytest.approx(0.1),
        (Phase.FORWARD, Kind.PARAMETERS): pytest.approx(0.1),
        (Phase.FORWARD, Kind.ACTIVATIONS): pytest.approx(0.1),
        (Phase.STEP, None): 0,
        (Phase.STEP, Kind.PARAMETERS): 0,
    }


def test_what_wears_the_disk_off_is_told_by_step_and_by_day() -> None:
    made = report([9.0, 2.0, 2.0])
    assert made.nvme_written_bytes() == made.nvme_written_bytes_per_day() == 0
    records = [replace(record, nvme_written_bytes=10) for record in made.records]
    made = replace(made, records=records)
    assert made.nvme_written_bytes() == 10
    assert made.nvme_written_bytes_per_day() == 10 * 24 * 60 * 60 / 2
    assert made.to_json()["nvme_written_bytes"] == {"step": 10, "day": 432000}


def test_the_share_of_communication_is_the_median_of_steps_after_the_first() -> None:
    made = report([1.0, 2.0, 2.0])
    assert made.to_json()["communication_share"] == 0
    records = [
        replace(r, communication_seconds=s) for r, s in zip(made.records, (1, 0.5, 1), strict=True)
    ]
    assert replace(made, records=records).communication_share() == pytest.approx(0.375)
    assert report([]).communication_share() is None


def test_figures_are_those_of_the_last_plan_and_changes_have_their_own() -> None:
    made = report([9.0, 5.0, 6.0, 5.0, 4.0, 3.0, 3.0, 2.0, 1.0])
    change = PlanChange(
        step=3, before=made.plan, after=made.plan, share=0.5, seconds=6.0, predicted_seconds=4.5
    )
    changes = [
        replace(change, step=1, failure="out of memory"),
        change,
        replace(change, step=7, seconds=3.0, predicted_seconds=2.5),
    ]
    made = replace(made, changes=changes)
    assert made.step_seconds() == 1.0, "the first step with a plan is not counted"
    assert [text.replace("  ", " ") for text in made.changes_in_words()] == [
        "after step 3 : 3.5 s per step, 6.0 s before, predicted 4.5 s",
        "after step 7 : 1.5 s per step, 3.0 s before, predicted 2.5 s",
    ]
    told = made.to_json()["plan_changes"]
    assert isinstance(told, list)
    assert [(each["step"], each["failure"]) for each in told] == [
        (1, "out of memory"), (3, None), (7, None),
    ]  # fmt: skip


def test_phases_that_one_side_does_not_know_are_there() -> None:
    measured = MemoryTable(
        {
            Phase.STEP: {Tier.DEVICE: {Kind.PARAMETERS: 5}},
            Phase.RESUME: {Tier.HOST: {Kind.TRANSFER: 7}},
        }
    )
    rows = {
        (r.phase, r.tier, r.kind): (r.predicted_bytes, r.measured_bytes, r.error)
        for r in report([1.0], measured=measured).differences()
    }
    assert rows[Phase.FORWARD, Tier.DEVICE, None] == (330, 0, None)
    assert rows[Phase.FORWARD, Tier.DEVICE, Kind.ACTIVATIONS] == (220, 0, None)
    assert rows[Phase.RESUME, Tier.HOST, None] == (0, 7, -1.0)
    assert rows[Phase.RESUME, Tier.HOST, Kind.TRANSFER] == (0, 7, -1.0)
    assert [phase for phase, *_ in rows] == sorted(
        (phase for phase, *_ in rows), key=list(Phase).index
    )


@pytest.mark.parametrize(
    ("seconds", "expected"), [([], None), ([9.0], 9.0), ([9.0, 1.0, 2.0, 3.0], 2.0)]
)
def test_the_first_step_does_not_count_where_there_are_more(
    seconds: list[float], expected: float | None
) -> None:
    assert report(seconds).step_seconds() == expected


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report([1.0], loss=math.nan).write(path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["steps"][0]["loss"] is None
    assert content["evaluations"][0]["loss"] is None
    assert content["step_seconds"] == {"predicted": 15, "measured": 1.0}
    assert content["measured"]["forward"]["device"] == {"parameters": 100, "activations": 200}
    assert content["answers"] == ["a"]
