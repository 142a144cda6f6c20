"""Files of the NVMe tier, read and written by threads past the kernel's cache.

A file has no name once it is open, so that a run that is killed leaves nothing behind; what it held
was never more than the running state, which the last checkpoint replaces. Knows nothing of what is
in a file. Linux only: other systems have no direct requests of this kind, or none at all.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tightfit.bill.on_disk import BLOCK_BYTES
from tightfit.engine.slab import memory_of
from tightfit.engine.transfer import Arrival
from tightfit.errors import DoesNotFitError, TrainingError
from tightfit.units import format_bytes

_SECTOR_BYTES = 512  # where a direct request that was cut short may go on
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskError(TrainingError):
    """A file of the NVMe tier cannot be made, read or written."""


def check_free(folder: Path, needed_bytes: int) -> None:
    """Whether so much can be written in `folder`, which need not exist yet.

    Raises:
        DoesNotFitError: less is free; the message says how much is missing.
    """
    free = _free_bytes(folder)
    if needed_bytes > free:
        raise _too_little(folder, needed_bytes, free)


@dataclass(eq=False)
class DiskFile:
    """A file of a fixed size that ends with this process.

    Attributes:
        folder, name: where it is and what it holds, for messages.
        direct: whether requests go past the kernel's cache; not on file systems that refuse to,
            such as those in memory.
    """

    folder: Path
    name: str
    size_bytes: int
    descriptor: int
    direct: bool

    @classmethod
    def create(cls, folder: Path, name: str, size_bytes: int) -> DiskFile:
        """A file whose blocks are all set aside now, of undefined content.

        Args:
            size_bytes: a multiple of `BLOCK_BYTES`.

        Raises:
            DoesNotFitError: the disk is too full for it.
            DiskError: the folder cannot be written to.
        """
        assert size_bytes % BLOCK_BYTES == 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
        except OSError as error:
            raise DiskError(
                f"no file can be made in {folder}: {error.strerror}; "
                "name another folder with offload_folder"
            ) from error
        Path(path).unlink()
        try:
            if size_bytes > 0:
                os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _FULL:
                raise
            raise _too_little(folder, size_bytes, _free_bytes(folder)) from error
        return cls(folder, name, size_bytes, descriptor, _make_direct(descriptor))

    def close(self) -> None:
        """Give its space back; nothing may be under way."""
        os.close(self.descriptor)


class Disk:
    """Reads and writes in the background, in threads of their own, so that none waits for another.

    Whatever goes wrong is raised where the arrival is waited for; later requests go on.

    Attributes:
        read_bytes, written_bytes: done so far, for what it wears off the disk.
    """

    def __init__(self, readers: int = 2, writers: int = 2) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self._readers = ThreadPoolExecutor(readers, "tightfit-read")
        self._writers = ThreadPoolExecutor(writers, "tightfit-write")
        self._lock = threading.Lock()
        self._pending: list[Future[None]] = []

    def read(self, file: DiskFile, offset_bytes: int, into: torch.Tensor) -> Arrival:
        """Begin to fill `into`, a contiguous host tensor, from a place in `file`.

        Address, size and offset are multiples of `BLOCK_BYTES`.
        """
        _check_aligned(file, offset_bytes, into)
        return self._submit(self._readers, self._read, file, offset_bytes, into)

    def write(self, file: DiskFile, offset_bytes: int, source: torch.Tensor) -> Arrival:
        """Begin to write `source` to a place in `file`; see `read`."""
        _check_aligned(file, offset_bytes, source)
        return self._submit(self._writers, self._write, file, offset_bytes, source)

    def wait(self) -> None:
        """Return when everything so far is done.

        Raises:
            DiskError: the first that went wrong since the last call.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        for error in [future.exception() for future in pending]:
            if error is not None:
                raise error

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._readers.shutdown()
        self._writers.shutdown()

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[DiskFile, int, torch.Tensor], None],
        file: DiskFile,
        offset_bytes: int,
        tensor: torch.Tensor,
    ) -> Arrival:
        future = threads.submit(work, file, offset_bytes, tensor)
        with self._lock:
            self._pending = [f for f in self._pending if not f.done() or f.exception()]
            self._pending.append(future)
        return _Request(future)

    def _read(self, file: DiskFile, offset_bytes: int, into: torch.Tensor) -> None:
        memory = memory_of(into)
        _move(os.preadv, "read", file, offset_bytes, memory)
        with self._lock:
            self.read_bytes += len(memory)

    def _write(self, file: DiskFile, offset_bytes: int, source: torch.Tensor) -> None:
        memory = memory_of(source)
        _move(os.pwritev, "written", file, offset_bytes, memory)
        with self._lock:
            self.written_bytes += len(memory)


class _Request:
    """A read or a write that is under way."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """See `Arrival.wait`.

        Raises:
            DiskError: what went wrong.
        """
        self._future.result()

    def order(self) -> None:
        """See `Arrival.order`; no stream can wait for a disk."""
        self.wait()


def _check_aligned(file: DiskFile, offset_bytes: int, tensor: torch.Tensor) -> None:
    size_bytes = tensor.numel() * tensor.element_size()
    for number in (offset_bytes, size_bytes, tensor.data_ptr()):
        assert number % BLOCK_BYTES == 0, "direct requests are in whole blocks"
    assert 0 <= offset_bytes <= file.size_bytes - size_bytes, "outside the file"


def _move(
    request: Callable[[int, list[memoryview], int], int],
    verb: str,
    file: DiskFile,
    offset_bytes: int,
    memory: memoryview,
) -> None:
    """All of `memory`, however little the system does at a time.

    Raises:
        DiskError: the system refuses, or nothing comes any more.
    """
    step = _SECTOR_BYTES if file.direct else 1
    done = 0
    while done < len(memory):
        place = offset_bytes + done
        try:
            moved = request(file.descriptor, [memory[done:]], place)
        except OSError as error:
            raise _failed(verb, file, place, error) from error
        if moved < step:
            raise DiskError(
                f"{file.name} in {file.folder} ended at {format_bytes(place)} of "
                f"{format_bytes(file.size_bytes)} where it was to be {verb}: something else has "
                "changed the file, or the disk; train on from the last checkpoint"
            )
        done += moved - moved % step


def _failed(verb: str, file: DiskFile, place: int, error: OSError) -> DiskError:
    if error.errno in _FULL:
        advice = "make room there, or name another folder with offload_folder"
    else:
        advice = (
            "the disk may be failing, so look at the kernel's messages (dmesg) and name a folder "
            "on another disk with offload_folder"
        )
    return DiskError(
        f"{file.name} in {file.folder} could not be {verb} at {format_bytes(place)} of "
        f"{format_bytes(file.size_bytes)}: {error.strerror}; {advice}, then train on from the "
        "last checkpoint"
    )


def _make_direct(descriptor: int) -> bool:
    """Pass the kernel's cache by from now on, where the file system can."""
    if sys.platform != "linux":
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _free_bytes(folder: Path) -> int:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _too_little(folder: Path, needed_bytes: int, free_bytes: int) -> DoesNotFitError:
    missing = max(0, needed_bytes - free_bytes)
    return DoesNotFitError(
        f"{format_bytes(needed_bytes)} of disk are needed in {folder} and "
        f"{format_bytes(free_bytes)} are free: {format_bytes(missing)} are missing; make room, "
        "name another folder with offload_folder, or let less go to nvme (a smaller "
        "optimizer_fraction or parameter_fraction)",
        missing,
    )
