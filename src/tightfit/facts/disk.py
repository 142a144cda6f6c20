"""The disk under a folder: how much is free, and what it is made of.

Reads `/sys/dev/block` and, for file systems without a device number of their own (btrfs),
`/proc/self/mountinfo`. Measures no speed. A disk of a virtual machine is `unknown`, because its
flags say nothing about what lies beneath.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Medium = Literal["nvme", "ssd", "hdd", "unknown"]

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


def read_disk(
    folder: Path, procfs: Path, sysfs: Path, device_number: Callable[[Path], int]
) -> Disk:
    """The disk of `folder`, which need not exist yet."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    block = _block_device(device_number(path), procfs, sysfs)
    medium: Medium = "unknown" if block is None else _medium(block)
    return Disk(path, shutil.disk_usage(path).free, medium)


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
    try:
        lines = (procfs / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, filesystem = line.partition(" - ")
        words = filesystem.split()
        if name in mount.split()[2:3] and len(words) >= 2 and words[1].startswith("/dev/"):
            return Path(words[1])
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
