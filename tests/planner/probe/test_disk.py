"""How much a probe may write, and that it leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tightfit.errors import ConfigError
from tightfit.planner.disk_rate import REQUEST_BYTES
from tightfit.planner.probe import disk
from tightfit.planner.probe.disk import bytes_to_write, measure_disk_under
from tightfit.planner.probe.figures import DiskFigures
from tightfit.units import GIB, MIB


@pytest.mark.parametrize(
    ("free", "wanted", "size"),
    [
        (100 * GIB, None, 512 * MIB),
        (2 * GIB, None, 96 * MIB),  # a twentieth, in whole requests
        (100 * MIB, None, 0),
        (100 * GIB, 25 * GIB, 25 * GIB),
        (100 * GIB, 8 * MIB + 1, 8 * MIB),
    ],
)
def test_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, wanted: int | None, size: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))
    assert bytes_to_write(tmp_path / "not there yet", wanted) == size


@pytest.mark.parametrize(("wanted", "said"), [(26 * GIB, "25.00 GiB"), (5, "less than one")])
def test_too_much_and_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, said: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    with pytest.raises(ConfigError, match=said):
        bytes_to_write(tmp_path, wanted)


def test_more_is_written_than_there_are_buffers_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_disk_under(tmp_path / "later", 9 * REQUEST_BYTES)
    assert isinstance(found, DiskFigures)
    assert found.written_bytes == 9 * REQUEST_BYTES
    assert min(found.read, found.write) > MIB
    assert list(tmp_path.iterdir()) == []


def test_why_nothing_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "too little room" in str(measure_disk_under(tmp_path, 0))
    assert "without any room" in str(measure_disk_under(Path("/proc"), REQUEST_BYTES))
    monkeypatch.setattr(disk, "try_disk", lambda folder, size: None)
    assert "cannot be written to" in str(measure_disk_under(tmp_path, REQUEST_BYTES))
