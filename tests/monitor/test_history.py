"""The history of runs: nothing is lost when runs end together, nothing breaks when one is torn."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightfit.monitor.history import (
    Part,
    RunEntry,
    append_entry,
    errors_of,
    history_file,
    lean_of,
    read_history,
)


def entry(predicted: float = 1.0, measured: float | None = 2.0, **given: Any) -> RunEntry:
    made = RunEntry(
        date="2026-12-01T10:00:00+00:00",
        model="tiny",
        device="a CPU",
        ranks=2,
        policies="micro-batch 1 x 2, 2 ranks, ZeRO-2",
        rates="probe",
        steps=3,
        step=Part(predicted, measured),
        parts={"compute": Part(0.9, None), "communication": Part(0.1, 0.2)},
        versions={"torch": "2"},
    )
    return dataclasses.replace(made, **given)


def test_what_is_added_is_read_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "not/there/yet.jsonl"
    entries = [entry(float(number + 1)) for number in range(3)]
    for each in entries:
        append_entry(each, path)
    assert read_history(path).entries == tuple(entries)
    assert len(path.read_text().splitlines()) == 3
    assert read_history(path).to_json()["runs"][0]["error"] == -0.5


def test_there_is_no_history_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path))
    assert history_file() == tmp_path / "history.jsonl"
    assert read_history().to_json() == {
        "runs": [],
        "unread_lines": 0,
        "median_error": None,
        "median_absolute_error": None,
        "leans": None,
    }


def test_half_a_line_costs_one_run(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_entry(entry(1.0), path)
    with path.open("ab") as file:
        file.write(b'{"date": "2026-12-')  # killed here
    append_entry(entry(2.0), path)
    append_entry(entry(3.0), path)
    history = read_history(path)
    assert [each.step.predicted for each in history.entries] == [1.0, 2.0, 3.0]
    assert history.unread == 1


def test_runs_that_end_together_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pydantic import TypeAdapter\n"
        "from tightfit.monitor.history import RunEntry, append_entry\n"
        "entry = TypeAdapter(RunEntry).validate_json(sys.argv[2])\n"
        "sys.stdin.readline()\n"
        "for _ in range(50): append_entry(entry, Path(sys.argv[1]))\n"
    )
    content = json.dumps(dataclasses.asdict(entry(policies="long " * 2000)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), content], stdin=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("now\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    history = read_history(path)
    assert (len(history.entries), history.unread) == (100, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(garbage=st.lists(st.binary(max_size=30), max_size=4))
def test_garbage_between_runs_hides_none(tmp_path: Path, garbage: list[bytes]) -> None:
    path = tmp_path / "history.jsonl"
    path.unlink(missing_ok=True)
    for piece in garbage:
        append_entry(entry(), path)
        with path.open("ab") as file:
            file.write(piece)
    append_entry(entry(), path)
    assert len(read_history(path).entries) == len(garbage) + 1


@pytest.mark.parametrize("change", [{"step": 5}, {"ranks": 0}, {"parts": {"a": {}}}])
def test_what_is_no_entry_is_counted_as_unread(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(entry()) | change) + "\n")
    assert read_history(path).unread == 1


def test_a_later_version_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(entry()) | {"more": 1}) + "\n")
    assert read_history(path).entries == (entry(),)


@pytest.mark.parametrize(
    ("errors", "leans"),
    [
        ([-0.2, -0.3, -0.1, -0.2, -0.4], "short"),
        ([0.2, 0.3, 0.1, 0.2, 0.4, 0.3, 0.1, -0.1], "long"),
        ([0.2, 0.3, 0.1, 0.2], None),  # too few to say
        ([0.01, 0.02, 0.01, 0.02, 0.03, 0.01], None),  # too little to matter
        ([-0.2, 0.3, -0.4, 0.1, -0.5, 0.6, -0.2], None),
        ([], None),
    ],
)
def test_leaning_to_one_side(errors: list[float], leans: str | None) -> None:
    assert lean_of(errors) == leans


def test_errors_of_those_that_have_one() -> None:
    assert errors_of([entry(3.0, 2.0), entry(1.0, None), entry(1.0, 0.0)]) == [0.5]
