"""The disk under a folder: how much is free, what it is made of, and whether it is one at all.

Reads `/sys/dev/block` and, for file systems without a device number of their own (btrfs) and for
their kinds, `/proc/self/mountinfo`. Measures no speed. A disk of a virtual machine is `unknown`,
because its flags say nothing about what lies beneath.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightfit.errors import ConfigError, TrainingError

Medium = Literal["nvme", "ssd", "hdd", "unknown"]

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_VIRTUAL = ("vd", "xvd", "loop", "zram", "ram", "nbd", "rbd", "fd", "sr")


@dataclass(frozen=True)
class Disk:
    """Room for checkpoints and for the disk tier.

    Attributes:
        path: the nearest existing folder on the way up from the one that was asked about.
    """

    path: Path
    free_bytes: int
    medium: Medium


@dataclass(frozen=True)
class DiskRate:
    """Sustained rates past the kernel's cache."""

    read_bytes_per_second: float
    write_bytes_per_second: float


# A common PCIe 3.0 SSD of 1 TB: 3,500 MB/s read and, once its fast buffer is full, 1,700 MB/s
# written (Samsung 970 EVO Plus, data sheet revision 2.0).
ASSUMED_DISK = DiskRate(3.5e9, 1.7e9)


def read_disk(
    folder: Path, procfs: Path, sysfs: Path, device_number: Callable[[Path], int]
) -> Disk:
    """The disk of `folder`, which need not exist yet."""
    path = nearest_existing(folder)
    block = _block_device(device_number(path), procfs, sysfs)
    medium: Medium = "unknown" if block is None else _medium(block)
    return Disk(path, shutil.disk_usage(path).free, medium)


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest above it that can be seen to exist: a folder, or a file."""
    # Path.exists raises where a folder may not be looked into.
    there = os.path.exists
    return next(p for p in (path.absolute(), *path.absolute().parents) if there(p))


def check_writable(key: str, folder: Path) -> None:
    """See that `folder`, or the nearest above it that is there, is one and may be written to.

    Args:
        key: whose value it is.

    Raises:
        ConfigError: it is not.
    """
    nearest = nearest_existing(folder)
    if not nearest.is_dir():
        raise ConfigError(f"{key} {folder}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} {folder}: {nearest} may not be written to")


@contextmanager
def writing(path: Path, done: str = "written") -> Iterator[None]:
    """Inside, a run writes or deletes `path`, which may fail: a full disk, a right that was taken.

    Args:
        done: what could not be done to it.

    Raises:
        TrainingError: it failed.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise TrainingError(
            f"{path} could not be {done} ({why}). Make room or see to the folder; checkpoints "
            "that are there are whole, and the run goes on from the last one with --resume"
        ) from error


def why_no_disk(folder: Path, procfs: Path = Path("/proc")) -> str | None:
    """Why what is written under `folder` is not on a disk; None where nothing says so.

    A file system in memory takes from the RAM that the disk tier is there to spare; one without any
    room (`/proc`, `/sys`) shows the kernel's own facts as files.
    """
    nearest = nearest_existing(folder)
    kind = _file_system(nearest, procfs)
    if kind in _IN_MEMORY:
        return f"{nearest} is on {kind}, which is RAM and not a disk"
    if not shutil.disk_usage(nearest).total:
        return f"{nearest} is {kind or 'a file system'} without any room, and not a disk"
    return None


def check_is_disk(folder: Path) -> None:
    """See that the disk tier may be under `folder`.

    Raises:
        ConfigError: what is written there is not on a disk.
    """
    reason = why_no_disk(folder)
    if reason is not None:
        raise ConfigError(
            f"offload_folder {folder}: {reason}; give an offload_folder on a disk, or let nothing "
            "go to nvme (offload_optimizer: cpu, offload_param: cpu)"
        )


def _file_system(path: Path, procfs: Path) -> str | None:
    """The kind of file system that `path` is on; None where nobody says."""
    path = path.resolve()
    found, depth = None, -1
    for mount in _mounts(procfs):
        # The last of those at one place is the one that is seen.
        if path.is_relative_to(mount.point) and len(mount.point.parts) >= depth:
            found, depth = mount.kind, len(mount.point.parts)
    return found


@dataclass(frozen=True)
class _Mount:
    """A line of `mountinfo`: `major:minor`, where it is seen, its kind and what it is of."""

    device: str
    point: Path
    kind: str
    source: str


def _mounts(procfs: Path) -> Iterator[_Mount]:
    """All that are mounted; none where the kernel has no such list."""
    try:
        lines = (procfs / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        before, after = mount.split(), file_system.split()
        if len(before) >= 5 and len(after) >= 2:
            yield _Mount(before[2], Path(_unescaped(before[4])), after[0], after[1])


def _unescaped(path: str) -> str:
    """Spaces and their like are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _block_device(number: int, procfs: Path, sysfs: Path) -> Path | None:
    """The folder under /sys that describes the device, None when there is none."""
    name = f"{os.major(number)}:{os.minor(number)}"
    direct = sysfs / "dev" / "block" / name
    if direct.exists():
        return direct.resolve()
    source = _mount_source(name, procfs)
    if source is None:
        return None
    named = sysfs / "class" / "block" / source.name
    return named.resolve() if named.exists() else None


def _mount_source(name: str, procfs: Path) -> Path | None:
    for mount in _mounts(procfs):
        if mount.device == name and mount.source.startswith("/dev/"):
            return Path(mount.source)
    return None


def _medium(block: Path) -> Medium:
    """What a block device is made of; a mapped or striped one is as slow as its slowest part."""
    if (block / "partition").exists():
        block = block.parent
    slaves = block / "slaves"
    parts = [part.resolve() for part in slaves.iterdir()] if slaves.is_dir() else []
    if parts:
        media = [_medium(part) for part in parts]
        order: tuple[Medium, ...] = ("unknown", "hdd", "ssd", "nvme")
        return min(media, key=order.index)
    if block.name.startswith("nvme"):
        return "nvme"
    try:
        rotational = (block / "queue" / "rotational").read_text().strip()
    except OSError:
        return "unknown"
    if block.name.startswith(_VIRTUAL):
        return "unknown"
    return "hdd" if rotational == "1" else "ssd"
