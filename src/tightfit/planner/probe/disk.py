"""Measures the disk under a folder for a probe, and never fills it.

Knows how much may be written; how it is written is `disk_rate.py`'s business.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tightfit.errors import ConfigError
from tightfit.facts.disk import nearest_existing, why_no_disk
from tightfit.planner.disk_rate import REQUEST_BYTES, try_disk
from tightfit.planner.probe.figures import DiskFigures
from tightfit.planner.probe.known import disk_identity
from tightfit.units import GIB, MIB, format_bytes

ASK_BYTES = 2 * GIB  # before more is written somebody is asked
_DEFAULT_BYTES = 512 * MIB
_DEFAULT_SHARE = 0.05  # of what is free
_MOST_SHARE = 0.25


def bytes_to_write(folder: Path, wanted_bytes: int | None) -> int:
    """How much a probe writes under `folder`: what is wanted, or 512 MiB and at most a twentieth of
    what is free; in whole requests, and 0 where that is less than one.

    Raises:
        ConfigError: more is wanted than a quarter of what is free, or less than one request.
    """
    free = shutil.disk_usage(nearest_existing(folder)).free
    if wanted_bytes is None:
        return _whole_requests(min(_DEFAULT_BYTES, int(free * _DEFAULT_SHARE)))
    if wanted_bytes > free * _MOST_SHARE:
        raise ConfigError(
            f"--disk-size {format_bytes(wanted_bytes)}: {format_bytes(free)} are free at "
            f"{nearest_existing(folder)}, and a probe writes at most a quarter of that; give up to "
            f"{format_bytes(free * _MOST_SHARE)}, or another --offload_folder"
        )
    if wanted_bytes < REQUEST_BYTES:
        raise ConfigError(
            f"--disk-size {format_bytes(wanted_bytes)} is less than one request of "
            f"{format_bytes(REQUEST_BYTES)}; give more, or --no-disk"
        )
    return _whole_requests(wanted_bytes)


def _whole_requests(size: int) -> int:
    return size // REQUEST_BYTES * REQUEST_BYTES


def measure_disk_under(folder: Path, size_bytes: int) -> DiskFigures | str:
    """The disk under a folder, or why it was not measured."""
    nearest = nearest_existing(folder)
    reason = why_no_disk(folder)
    if reason is not None:
        return reason
    if not size_bytes:
        return f"{nearest} has too little room"
    found = try_disk(nearest, size_bytes)
    if found is None:
        return f"{nearest} cannot be written to, or not past the kernel's cache"
    device, total = disk_identity(nearest)
    return DiskFigures(
        folder=str(nearest.resolve()),
        device=device,
        total_bytes=total,
        written_bytes=size_bytes,
        read=found.read_bytes_per_second,
        write=found.write_bytes_per_second,
    )
