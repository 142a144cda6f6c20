"""A disk is measured with little, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.engine.disk import DiskFile
from tightfit.planner.disk_rate import ASSUMED_DISK, measure_disk
from tightfit.units import MIB


def test_what_is_measured_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    create = DiskFile.create

    def counted(folder: Path, name: str, size_bytes: int) -> DiskFile:
        sizes.append(size_bytes)
        return create(folder, name, size_bytes)

    monkeypatch.setattr(DiskFile, "create", counted)
    found = measure_disk(tmp_path)
    assert found.read_bytes_per_second > MIB
    assert found.write_bytes_per_second > MIB
    assert sum(sizes) <= 64 * MIB
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_assumed(tmp_path: Path) -> None:
    assert measure_disk(Path("/proc")) == ASSUMED_DISK


def test_a_file_system_in_memory_says_nothing_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = DiskFile.create

    def buffered(folder: Path, name: str, size_bytes: int) -> DiskFile:
        file = create(folder, name, size_bytes)
        file.direct = False
        return file

    monkeypatch.setattr(DiskFile, "create", buffered)
    assert measure_disk(tmp_path) == ASSUMED_DISK
