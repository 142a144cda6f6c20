"""The NVMe tier: pieces of files are read ahead while one is used and others are written.

Pieces pass through a few buffers of the slab. Whoever is done with one gives it back at once, with
whatever still reads or writes it, for which whoever takes it next waits. In a dry run nothing
touches a disk: files are booked, reads and writes skipped. Knows nothing of what is in a piece.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit import ledger
from tightfit.bill.on_disk import BLOCK_BYTES, whole_blocks
from tightfit.bill.table import Kind
from tightfit.engine.disk import Disk, DiskFile, check_free
from tightfit.engine.slab import HostSlab, Reserved
from tightfit.engine.transfer import THERE, Arrival
from tightfit.errors import TrainingError
from tightfit.policies import Tier

BUFFERS = 6  # reading, computing and writing are all busy; with 3 a step takes a fifth longer
_HELD = 4  # of them: one in use, the others being read


class DiskTier:
    """Scratch files in a folder, threads that read and write them, buffers that all users share.

    Users say with `need` how large a piece is; then `reserve`, before the slab is allocated.

    Args:
        folder: on a fast disk; made when it is not there. Ranks and runs may share it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffers = Buffers()
        self._disk = None if detect_fake_mode() is not None else Disk()
        self._files: list[DiskFile] = []
        self._ends: list[weakref.finalize[[int], DiskFile]] = []

    def create(self, files: Mapping[str, Mapping[Kind, int]]) -> list[BookedFile]:
        """Files of so many bytes, by name and kind; none is made where not all have room.

        Raises:
            DoesNotFitError: the disk is too full.
            DiskError: the folder cannot be written to.
        """
        sizes = {name: sum(kinds.values()) for name, kinds in files.items()}
        if self._disk is not None:
            check_free(self.folder, sum(sizes.values()))
        return [self._create(name, sizes[name], kinds) for name, kinds in files.items()]

    def _create(self, name: str, size_bytes: int, kinds: Mapping[Kind, int]) -> BookedFile:
        if self._disk is None:
            return BookedFile(None, None, kinds)
        file = DiskFile.create(self.folder, name, size_bytes)
        self._files.append(file)
        # Requests that are under way have the file as well.
        self._ends.append(weakref.finalize(file, os.close, file.descriptor))
        return BookedFile(self._disk, file, kinds)

    @property
    def is_imaginary(self) -> bool:
        """Whether this is a dry run's: booked, and nothing is read or written."""
        return self._disk is None

    @property
    def written_bytes(self) -> int:
        """Written so far, to all files."""
        return 0 if self._disk is None else self._disk.written_bytes

    def close(self) -> None:
        """Finish what is under way, end the threads and give the disk's space back.

        So does the end of this object, as when a plan that ran out of memory is replaced, but that
        waits for nothing: the garbage collector may come to it in any thread, whatever that holds.
        """
        if self._disk is not None:
            self._disk.close()
        for end in self._ends:
            end()


class BookedFile:
    """A scratch file that the ledger counts on the NVMe tier.

    Args:
        disk: None in a dry run, where all reads and writes are done already.
        file: None in a dry run.
        kinds: bytes of what is in it.
    """

    def __init__(self, disk: Disk | None, file: DiskFile | None, kinds: Mapping[Kind, int]) -> None:
        self._disk = disk
        self._file = file
        self._bookings = [_booking(kind, size_bytes) for kind, size_bytes in kinds.items()]

    def read(self, offset_bytes: int, into: torch.Tensor) -> Arrival:
        """Begin to fill `into`, uint8, whole blocks, from there."""
        if self._disk is None or self._file is None:
            return THERE
        return self._disk.read(self._file, offset_bytes, into)

    def write(self, offset_bytes: int, source: torch.Tensor) -> Arrival:
        """Begin to write `source`, uint8, whole blocks, there."""
        if self._disk is None or self._file is None:
            return THERE
        return self._disk.write(self._file, offset_bytes, source)


def _booking(kind: Kind, size_bytes: int) -> torch.Tensor:
    """A tensor that takes no memory, for the ledger to count while it lives."""
    with ledger.labelled(kind, Tier.NVME), detect_fake_mode() or FakeTensorMode():
        return torch.empty(size_bytes, dtype=torch.uint8)


class Buffers:
    """A bounded set of page-aligned host buffers, all of the size of the largest piece."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._fresh: list[Reserved] = []
        self._free: deque[tuple[torch.Tensor, Sequence[Arrival]]] = deque()
        self._given_back = threading.Condition()

    def need(self, size_bytes: int) -> None:
        """There will be pieces of so many bytes."""
        self._size_bytes = max(self._size_bytes, whole_blocks(size_bytes))

    def reserve(self, slab: HostSlab, count: int = BUFFERS) -> None:
        """Ask for the buffers when all needs are known.

        Args:
            count: at least as many as threads use the tier at a time.
        """
        self._fresh = [
            slab.reserve((self._size_bytes,), torch.uint8, Kind.TRANSFER, align=BLOCK_BYTES)
            for _ in range(count)
        ]

    def take(self, *, wait: bool = True) -> torch.Tensor | None:
        """A buffer, uint8, when the disk is done with it.

        Args:
            wait: for one, if all are taken; else there is None.
        """
        with self._given_back:
            if self._fresh:
                return self._fresh.pop().tensor
            while not self._free:
                if not wait:
                    return None
                self._given_back.wait()
            buffer, busy = self._free.popleft()
        for arrival in busy:
            with suppress(TrainingError):  # told to whoever has begun it
                arrival.wait()
        return buffer

    def give_back(self, buffer: torch.Tensor, busy: Sequence[Arrival] = ()) -> None:
        """Let the next one have it when all of `busy` have arrived."""
        with self._given_back:
            self._free.append((buffer, busy))
            self._given_back.notify()


@dataclass(frozen=True)
class Part:
    """A stretch of a file, whole blocks, that belongs to a place in a buffer."""

    file: BookedFile
    offset_bytes: int
    size_bytes: int
    at_bytes: int = 0

    def read(self, buffer: torch.Tensor) -> Arrival:
        """Begin to read it."""
        return self.file.read(self.offset_bytes, self._of(buffer))

    def write(self, buffer: torch.Tensor) -> Arrival:
        """Begin to write it."""
        return self.file.write(self.offset_bytes, self._of(buffer))

    def _of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.at_bytes : self.at_bytes + self.size_bytes]


@dataclass
class InUse:
    """A buffer with a piece, and what will still use it when its user is done."""

    buffer: torch.Tensor
    busy: list[Arrival] = field(default_factory=list)


class ReadAhead:
    """The pieces of a row in its order, read before they are asked for.

    One thread at a time uses it, but not always the same one.

    Args:
        pieces: the parts of each; a piece without parts is an empty buffer.
    """

    def __init__(self, buffers: Buffers, pieces: Iterable[Sequence[Part]]) -> None:
        self._buffers = buffers
        self._later = deque(pieces)
        self._coming: deque[InUse] = deque()
        self._read_on()

    @contextmanager
    def piece(self) -> Iterator[InUse]:
        """The next piece; its buffer goes back at the end.

        Raises:
            TrainingError: it cannot be read.
        """
        for arrival in self._coming[0].busy:
            arrival.wait()
        piece = self._coming.popleft()
        piece.busy.clear()
        try:
            yield piece
        finally:
            self._buffers.give_back(piece.buffer, piece.busy)
        self._read_on()

    def _read_on(self) -> None:
        """Never waits for a buffer while it holds one that its user does not have yet."""
        while self._later and len(self._coming) < _HELD:
            buffer = self._buffers.take(wait=not self._coming)
            if buffer is None:
                return
            piece = InUse(buffer)
            self._coming.append(piece)
            piece.busy.extend(part.read(buffer) for part in self._later.popleft())

    def close(self) -> None:
        """Give back what was read ahead and is not wanted any more."""
        self._later.clear()
        while self._coming:
            piece = self._coming.popleft()
            self._buffers.give_back(piece.buffer, piece.busy)


class Writes:
    """Writes that somebody wants to know the end of; the first that fails is told soon."""

    def __init__(self) -> None:
        self._under_way: deque[Arrival] = deque()

    def add(self, write: Arrival) -> None:
        """One more has begun.

        Raises:
            TrainingError: an earlier one has failed.
        """
        self._under_way.append(write)
        if len(self._under_way) > BUFFERS:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Return when all are done.

        Raises:
            TrainingError: one of them has failed.
        """
        while self._under_way:
            self._under_way.popleft().wait()

    def abandon(self) -> None:
        """Return when all are over, whether they were done or not."""
        while self._under_way:
            with suppress(TrainingError):
                self._under_way.popleft().wait()
