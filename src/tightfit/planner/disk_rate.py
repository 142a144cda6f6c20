"""How fast the nvme tier's disk is: measured with the tier's own reads and writes, or assumed.

At most 64 MiB are written, to a file without a name that is gone when it is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tightfit.bill.on_disk import BLOCK_BYTES
from tightfit.bill.table import Kind
from tightfit.engine.disk import Disk, DiskError, DiskFile
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Arrival
from tightfit.errors import DoesNotFitError
from tightfit.units import MIB

_REQUEST_BYTES = 8 * MIB
_REQUESTS = 8


@dataclass(frozen=True)
class DiskRate:
    """Sustained rates past the kernel's cache."""

    read_bytes_per_second: float
    write_bytes_per_second: float


# A common PCIe 3.0 SSD of 1 TB: 3,500 MB/s read and, once its fast buffer is full, 1,700 MB/s
# written (Samsung 970 EVO Plus, data sheet revision 2.0).
ASSUMED_DISK = DiskRate(3.5e9, 1.7e9)


def measure_disk(folder: Path) -> DiskRate:
    """The rates of the disk under `folder`, which exists, in well under a second on an SSD.

    What is assumed, where nothing can be written there or the file system has no direct requests.
    """
    try:
        file = DiskFile.create(folder, "rate", _REQUESTS * _REQUEST_BYTES)
    except (DiskError, DoesNotFitError):
        return ASSUMED_DISK
    disk = Disk()
    try:
        return _measured(disk, file) if file.direct else ASSUMED_DISK
    except DiskError:
        return ASSUMED_DISK
    finally:
        disk.close()
        file.close()


def _measured(disk: Disk, file: DiskFile) -> DiskRate:
    slab = HostSlab(torch.device("cpu"))
    reserved = [
        slab.reserve((_REQUEST_BYTES,), torch.uint8, Kind.TRANSFER, align=BLOCK_BYTES)
        for _ in range(_REQUESTS)
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
    arrivals = [move(file, index * _REQUEST_BYTES, buffer) for index, buffer in enumerate(buffers)]
    for arrival in arrivals:
        arrival.wait()
    return len(buffers) * _REQUEST_BYTES / (time.perf_counter() - start)
