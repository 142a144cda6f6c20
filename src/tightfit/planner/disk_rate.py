"""How fast the nvme tier's disk is: measured with the tier's own reads and writes, or assumed.

What is written goes to a file without a name that is gone when it is closed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from tightfit.bill.on_disk import BLOCK_BYTES
from tightfit.bill.table import Kind
from tightfit.engine.disk import Disk, DiskError, DiskFile
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Arrival
from tightfit.errors import DoesNotFitError
from tightfit.facts.disk import ASSUMED_DISK, DiskRate
from tightfit.units import MIB

REQUEST_BYTES = 8 * MIB
_BUFFERS = 8
QUICK_BYTES = _BUFFERS * REQUEST_BYTES


def measure_disk(folder: Path) -> DiskRate:
    """The rates of the disk under `folder`, which exists, in well under a second on an SSD.

    64 MiB are written. What is assumed, where nothing can be written there or the file system has
    no direct requests.
    """
    return try_disk(folder, QUICK_BYTES) or ASSUMED_DISK


def try_disk(folder: Path, size_bytes: int) -> DiskRate | None:
    """The rates of the disk under `folder`, which exists; None where nothing can be written there
    or the file system has no direct requests.

    Args:
        size_bytes: written and read once; a multiple of `REQUEST_BYTES`.
    """
    try:
        file = DiskFile.create(folder, "rate", size_bytes)
    except (DiskError, DoesNotFitError):
        return None
    disk = Disk()
    try:
        return _measured(disk, file) if file.direct else None
    except DiskError:
        return None
    finally:
        disk.close()
        file.close()


def _measured(disk: Disk, file: DiskFile) -> DiskRate:
    slab = HostSlab(torch.device("cpu"))
    reserved = [
        slab.reserve((REQUEST_BYTES,), torch.uint8, Kind.TRANSFER, align=BLOCK_BYTES)
        for _ in range(_BUFFERS)
    ]
    slab.allocate()
    buffers = [buffer.tensor.random_() for buffer in reserved]  # zeros may never reach the disk
    written = _bytes_per_second(disk.write, file, buffers)
    return DiskRate(_bytes_per_second(disk.read, file, buffers), written)


def _bytes_per_second(
    move: Callable[[DiskFile, int, torch.Tensor], Arrival],
    file: DiskFile,
    buffers: list[torch.Tensor],
) -> float:
    start = time.perf_counter()
    waiting: deque[Arrival] = deque()
    for index in range(file.size_bytes // REQUEST_BYTES):
        if len(waiting) == len(buffers):
            waiting.popleft().wait()  # whose buffer comes next
        waiting.append(move(file, index * REQUEST_BYTES, buffers[index % len(buffers)]))
    for arrival in waiting:
        arrival.wait()
    return file.size_bytes / (time.perf_counter() - start)
