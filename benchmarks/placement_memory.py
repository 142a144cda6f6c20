"""What the kernel says of this process: its own memory, and what it has moved to and from disks."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_MAPPED_FROM_BYTES = 65536


def return_freed_memory() -> None:
    """Give back what was freed, and from now on each larger piece as soon as it is freed."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    libc.malloc_trim(0)


def anonymous_bytes() -> int:
    """Memory that belongs to no file."""
    return _status("RssAnon")


def forget_peak() -> None:
    """Begin a new peak."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_anonymous_bytes() -> int:
    """The most since `forget_peak`, if files' pages are as many as they were."""
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def disk_bytes() -> dict[str, int]:
    """Read from and written to disks so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return {"disk_read": int(counts["read_bytes"]), "disk_written": int(counts["write_bytes"])}


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel says nothing of {key}")
