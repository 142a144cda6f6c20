"""Where the disk tier may be: what exists on the way there, and whether it is a disk at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.errors import ConfigError
from tightfit.facts import disk
from tightfit.facts.disk import check_is_disk, check_writable, nearest_existing, why_no_disk

IN_MEMORY = disk._IN_MEMORY  # before tests/conftest.py says that any will do


@pytest.fixture
def procfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount table: a disk, and in it a folder in memory, a disk in that, and one hidden."""
    monkeypatch.setattr(disk, "_IN_MEMORY", IN_MEMORY)
    mounts = [("/", "ext4"), ("memory", "tmpfs"), ("memory/disk", "xfs"), ("old pages", "tmpfs")]
    mounts += [("covered", "ramfs"), ("covered", "btrfs"), ("huge", "hugetlbfs")]
    lines = []
    for number, (name, kind) in enumerate(mounts):
        point = tmp_path.resolve() / name if name != "/" else Path("/")
        point.mkdir(exist_ok=True)
        shown = str(point).replace(" ", r"\040")
        lines.append(f"{number} 1 0:{number} / {shown} rw shared:1 - {kind} none rw")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text("\n".join([*lines, "torn - line"]))
    return tmp_path / "proc"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("plain", None),
        ("memory", "tmpfs"),
        ("memory/not/yet", "tmpfs"),
        ("memory/disk/a", None),
        ("memory/disk/../a", "tmpfs"),
        ("memories", None),
        ("old pages", "tmpfs"),
        ("covered/a", None),
        ("huge/a", "hugetlbfs"),
        ("link/a", "tmpfs"),
    ],
)
def test_memory_is_no_disk(procfs: Path, tmp_path: Path, folder: str, kind: str | None) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "memory")
    found = why_no_disk(tmp_path / folder, procfs)
    assert (found is None) is (kind is None)
    assert found is None or f"is on {kind}, which is RAM and not a disk" in found


@pytest.mark.parametrize("folder", ["/proc", "/proc/self/offload", "/sys/kernel"])
def test_the_kernels_own_files_are_no_disk(folder: str) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("this system has no /proc")
    with pytest.raises(
        ConfigError, match=rf"^offload_folder {folder}: .*without any room, and not"
    ):
        check_is_disk(Path(folder))


def test_a_folder_in_memory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_file_system", lambda path, procfs: "ramfs")
    monkeypatch.setattr(disk, "_IN_MEMORY", IN_MEMORY)
    with pytest.raises(ConfigError, match=r"ramfs, which is RAM.*give an offload_folder on a disk"):
        check_is_disk(tmp_path)


def test_without_a_table_nothing_is_refused(tmp_path: Path) -> None:
    assert why_no_disk(tmp_path, tmp_path / "no proc") is None


def test_the_nearest_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert nearest_existing(tmp_path / "file" / "b") == tmp_path / "file"
    monkeypatch.chdir(tmp_path)
    assert nearest_existing(Path("a/b")) == tmp_path
    check_writable("key", tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match=r"^key .*file is a file, not a folder"):
        check_writable("key", tmp_path / "file" / "b")
