"""What a Linux container or service may take of its machine: memory and processor time.

Reads control groups of both versions. Knows nothing about the machine itself; where there are no
control groups (macOS, Windows) there are no limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class CgroupLimits:
    """Limits on this process; None means no limit.

    Attributes:
        memory_left_bytes: the limit less what is in use, not counting file cache that the kernel
            drops when asked.
        cpus: processor time per second of wall time, in cores.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cpus: float | None = None


def read_cgroup_limits(procfs: Path, sysfs: Path) -> CgroupLimits:
    """The tightest limits on the way from this process's group up to the root."""
    memory: list[int] = []
    left: list[int] = []
    cpus: list[float] = []
    for folder in _folders(procfs, sysfs, "memory"):
        limit = _memory_limit(folder)
        if limit is not None:
            memory.append(limit)
            left.append(max(0, limit - _memory_in_use(folder)))
    for folder in _folders(procfs, sysfs, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cpus.append(quota)
    return CgroupLimits(min(memory, default=None), min(left, default=None), min(cpus, default=None))


def _folders(procfs: Path, sysfs: Path, controller: str) -> list[Path]:
    """Folders of this process's group and its ancestors, for one controller.

    Inside a container the path may be the host's and not exist here; the ancestors that do exist
    are the container's own.
    """
    folders = []
    for line in _read(procfs / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and number == "0":
            root = sysfs / "fs" / "cgroup"
        elif controller in controllers.split(","):
            root = sysfs / "fs" / "cgroup" / controller
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        folders += [root / part for part in (group, *group.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _read(path: Path) -> str:
    """Text of a small kernel file; empty when it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a kernel file; None for `max`, for the old `no limit` and for no file."""
    text = _read(path).strip()
    if not text.isdecimal() or int(text) >= 2**62:
        return None
    return int(text)


def _memory_limit(folder: Path) -> int | None:
    new, old = _number(folder / "memory.max"), _number(folder / "memory.limit_in_bytes")
    return old if new is None else new


def _memory_in_use(folder: Path) -> int:
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    statistics = dict(
        line.split(maxsplit=1)
        for line in _read(folder / "memory.stat").splitlines()
        if len(line.split()) == 2
    )
    cache = statistics.get("total_inactive_file") or statistics.get("inactive_file") or "0"
    return max(0, used - int(cache))


def _cpu_quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdecimal():
        return int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None
