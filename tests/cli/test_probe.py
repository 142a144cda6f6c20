"""`tightfit probe`: measures little, shows and keeps it, and says what it does not do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.test_history import entry
from tests.planner.probe.machines import host_figures, link_figures

from tightfit.cli import probe as verb
from tightfit.cli.main import main
from tightfit.errors import RankError
from tightfit.monitor.history import append_entry
from tightfit.planner.machine import usable_hardware
from tightfit.planner.measure import _HOST_BUFFER_BYTES
from tightfit.planner.probe import host
from tightfit.planner.probe.kept import file_of, identity_of, read_probe
from tightfit.units import GIB, MIB

Captured = pytest.CaptureFixture[str]
PAGE = Path(__file__).parents[2] / "docs" / "json.md"


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, moments instead of seconds, and ranks that have measured before."""
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "_SECONDS", 0.001)
    monkeypatch.setattr(host, "_ROUNDS", 1)
    monkeypatch.setattr(host, "_HOST_WIDTHS", (16, 32))
    monkeypatch.setattr(
        verb, "measure_host", lambda counts, rounds=1: [host_figures(1, float(rounds))]
    )
    monkeypatch.setattr(verb, "measure_link", lambda ranks, kind: link_figures(ranks=ranks))
    assert _HOST_BUFFER_BYTES <= 64 * MIB


def run(*argv: str) -> int:
    return main(["probe", *argv])


def documented() -> set[str]:
    return set(re.findall(r"`([^`]+)`", PAGE.read_text()))


def keys_of(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from keys_of(value)
    elif isinstance(content, list):
        for value in content:
            yield from keys_of(value)


def test_what_is_measured_is_shown_and_kept(tmp_path: Path, capsys: Captured) -> None:
    assert run("--offload_folder", str(tmp_path), "--disk-size", "8MiB") == 0
    out = capsys.readouterr().out
    assert "fused AdamW" in out
    assert "2 ranks over gloo" in out
    assert "8.0 MiB, past the kernel's cache" in out
    found, reason = read_probe(identity_of(usable_hardware(tmp_path)))
    assert reason is None
    assert found is not None
    assert found.disk is not None
    assert str(file_of(found.identity)) in out.replace("\n", "")


def test_json_is_documented(tmp_path: Path, capsys: Captured) -> None:
    assert run("--offload_folder", str(tmp_path), "--disk-size", "8MiB", "--json") == 0
    content = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    numbers = re.compile(r"\d+")
    missing = {key for key in keys_of(content) if not numbers.fullmatch(key)} - documented()
    assert not missing
    section = PAGE.read_text().split("\n## `tightfit probe --json`")[1].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.M)) == set(content)
    assert content["disk"]["written_bytes"] == 8 * MIB
    assert content["ram_bytes"]["total"] > 0


def test_no_disk_and_no_ranks(tmp_path: Path, capsys: Captured) -> None:
    assert run("--no-disk", "--num_gpus", "1", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["disk"], content["link"]) == (None, None)


def test_ranks_that_fail_are_a_note(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def fails(ranks: int, kind: str) -> None:
        raise RankError("rank 1 was killed")

    monkeypatch.setattr(verb, "measure_link", fails)
    assert run("--no-disk", "--num_gpus", "3", "--json") == 0
    (note,) = [n for n in json.loads(capsys.readouterr().out)["notes"] if "link" in n]
    assert note == "the link between 3 ranks could not be measured: rank 1 was killed"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num_gpus", "0"], "--num_gpus 0 is no number of ranks"),
        (["--num_gpus", "two"], "is no number of ranks"),
        (["--disk-size", "much"], "'much' is not a size"),
        (["--disk-size", "900TiB"], "at most a quarter"),
        (["--disk-size", "1GiB", "--no-disk"], "contradict each other"),
        (["--learning_rate", "1"], "--learning_rate"),
        (["job.yaml"], "unexpected argument"),
    ],
)
def test_mistakes(argv: list[str], said: str, capsys: Captured) -> None:
    assert run(*argv) == 2
    assert said in capsys.readouterr().err


def test_nobody_is_there_to_be_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    monkeypatch.setattr(verb, "bytes_to_write", lambda folder, wanted: 3 * GIB)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert run("--offload_folder", str(tmp_path), "--disk-size", "3GiB") == 2
    assert "3.00 GiB will be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Terminal:
    def __init__(self, answer: str) -> None:
        self.answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.answer


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("", 2), ("y\n", 0)])
def test_a_person_is_asked_before_much_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path, answer: str, code: int
) -> None:
    written: list[int] = []
    monkeypatch.setattr(verb, "bytes_to_write", lambda folder, wanted: 3 * GIB)
    monkeypatch.setattr(verb, "measure_disk_under", lambda folder, size: str(written.append(size)))
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert run("--offload_folder", str(tmp_path), "--disk-size", "3GiB", "--num_gpus", "1") == code
    assert "Go on? [y/N]" in capsys.readouterr().err
    assert written == [3 * GIB] * (code == 0)


def test_yes_needs_no_question(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(verb, "bytes_to_write", lambda folder, wanted: 3 * GIB)
    monkeypatch.setattr(verb, "measure_disk_under", lambda folder, size: "not here")
    assert run("--disk-size", "3GiB", "--yes", "--num_gpus", "1") == 0
    assert "no disk was measured: not here" in capsys.readouterr().out


def test_where_nothing_can_be_kept_the_figures_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "file"))
    assert run("--no-disk", "--num_gpus", "1") == 0
    assert "not kept: " in capsys.readouterr().out


class Busy:
    cores = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        yield


def test_a_disturbed_probe_does_not_take_the_place_of_a_good_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    def kept() -> float:
        found, _ = read_probe(identity_of(usable_hardware(tmp_path)))
        assert found is not None
        # A disturbed one has measured again, and the best counts.
        assert found.host[0].memory == 2e9 * (host.MORE_ROUNDS if found.busy_cores else 1)
        return found.busy_cores

    monkeypatch.setattr(verb, "OthersBusy", Busy)
    for cores, stays in ((900.0, 900.0), (0.0, 0.0), (800.0, 0.0)):
        Busy.cores = cores
        assert run("--no-disk", "--num_gpus", "1") == 0
        assert kept() == stays
    out = capsys.readouterr().out
    assert "processors busy meanwhile" in out
    assert "when the machine was free, stays" in out.replace("\n", " ")


def test_history(capsys: Captured) -> None:
    assert run("--history") == 0
    assert "no training run has been recorded yet" in capsys.readouterr().out
    append_entry(entry(1.0, 2.0))
    assert run("--history") == 0
    assert "median error -50%" in capsys.readouterr().out
    assert run("--history", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert not set(keys_of(content)) - documented()
    assert content["median_error"] == -0.5
