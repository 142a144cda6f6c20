"""What a run says of its steps, where the output is a terminal and where it is not."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tightfit.monitor.progress import RunProgress
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.units import MIB


def record(step: int, *, now: int | None = 2 * MIB, skipped: bool = False) -> StepRecord:
    return StepRecord(
        step=step, epoch=0.5, loss=2.5, learning_rate=1e-4, grad_norm=1.25, tokens=100,
        seconds=0.5, device_bytes=now, device_peak_bytes=3 * MIB, skipped=skipped,
    )  # fmt: skip


def said(*records: StepRecord, terminal: bool = False, limit: int | None = 4 * MIB) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system=None, width=200)
    with RunProgress(console, 10, limit) as progress:
        for each in records:
            progress.step(each)
        progress.evaluation(EvaluationRecord(step=4, loss=1.5, seconds=2.0))
    return file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_shows_all_that_matters(terminal: bool) -> None:
    out = said(record(4), terminal=terminal)
    for words in (
        "loss 2.5000", "lr 1.00e-04", "norm 1.25", "200 tok/s",
        "device 2.0 MiB now, peak 3.0 MiB of 4.0 MiB", "left", "held-out loss 1.5000 after step 4",
    ):  # fmt: skip
        assert words in out, words


def test_the_share_of_communication_is_said_where_there_are_several_ranks() -> None:
    assert "comm" not in said(record(4))
    assert "200 tok/s  comm 34%  device" in said(replace(record(4), communication_seconds=0.17))


def test_plain_lines_without_a_terminal() -> None:
    out = said(record(4), record(5)).splitlines()
    assert [line.split(" ")[1] for line in out[:2]] == ["4/10", "5/10"]
    assert out[0].endswith("left 3.0 s")
    assert len(out) == 3


def test_nothing_is_said_that_nobody_counted() -> None:
    out = said(record(4, now=None), limit=None)
    assert "device peak 3.0 MiB  left" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_a_skipped_step_is_said(terminal: bool) -> None:
    assert "step 4 skipped: gradient norm 1.25" in said(record(4, skipped=True), terminal=terminal)
