"""Round trips past the cache, and disks that are full, broken, slow or answer in pieces."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightfit.bill.on_disk import BLOCK_BYTES
from tightfit.bill.table import Kind
from tightfit.engine.disk import Disk, DiskError, DiskFile, check_free
from tightfit.engine.slab import HostSlab
from tightfit.errors import DoesNotFitError, TrainingError
from tightfit.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVMe tier is for Linux")

Plain = Callable[[int, list[memoryview], int], int]


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskFile]:
    file = DiskFile.create(tmp_path, "states", 16 * BLOCK_BYTES)
    yield file
    file.close()


def buffers(*blocks: int) -> list[torch.Tensor]:
    """Bytes that a direct request can use."""
    slab = HostSlab(torch.device("cpu"))
    sizes = [count * BLOCK_BYTES for count in blocks]
    places = [slab.reserve((s,), torch.uint8, Kind.TRANSFER, align=BLOCK_BYTES) for s in sizes]
    slab.allocate()
    return [place.tensor for place in places]


def noise(into: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return into.random_(0, 256, generator=generator)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_what_is_written_in_any_order_is_read_in_any_other(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[int], order: Any
) -> None:
    disk = Disk(readers=2, writers=3)
    file = DiskFile.create(tmp_path_factory.mktemp("disk"), "states", sum(blocks) * BLOCK_BYTES)
    offsets = list(itertools.accumulate([0, *(count * BLOCK_BYTES for count in blocks)]))[:-1]
    sources, places = buffers(*blocks), buffers(*blocks)
    numbers = list(range(len(blocks)))
    for number in numbers:
        noise(sources[number], number)
    for number in order.sample(numbers, len(numbers)):
        disk.write(file, offsets[number], sources[number])
    disk.wait()
    arrivals = [
        disk.read(file, offsets[number], places[number])
        for number in order.sample(numbers, len(numbers))
    ]
    for arrival in arrivals:
        arrival.order()
    assert all(torch.equal(a, b) for a, b in zip(sources, places, strict=True))
    assert disk.written_bytes == disk.read_bytes == sum(blocks) * BLOCK_BYTES
    disk.close()
    file.close()


def test_other_types_travel_as_their_bytes(disk: Disk, file: DiskFile) -> None:
    source, place = buffers(2, 2)
    source = source.view(torch.bfloat16).fill_(1.5)
    disk.write(file, BLOCK_BYTES, source).wait()
    disk.read(file, BLOCK_BYTES, place).wait()
    assert torch.equal(place.view(torch.bfloat16), source)


def test_a_file_is_direct_where_that_is_possible(tmp_path: Path, disk: Disk) -> None:
    """Either way it works; what it says is what the kernel says."""
    for folder in {tmp_path, Path("/dev/shm")}:
        file = DiskFile.create(folder, "tightfit-test", BLOCK_BYTES)
        flags = Path(f"/proc/self/fdinfo/{file.descriptor}").read_text().split("flags:")[1].split()
        assert bool(int(flags[0], 8) & os.O_DIRECT) is file.direct
        source, place = buffers(1, 1)
        disk.write(file, 0, noise(source)).wait()
        disk.read(file, 0, place).wait()
        assert torch.equal(source, place)
        file.close()


def test_a_file_system_without_direct_requests_is_used_all_the_same(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    plain = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    file = DiskFile.create(tmp_path, "states", BLOCK_BYTES)
    assert not file.direct
    source, place = buffers(1, 1)
    disk.write(file, 0, noise(source)).wait()
    disk.read(file, 0, place).wait()
    assert torch.equal(source, place)
    file.close()


def in_pieces(plain: Plain, pieces: Iterator[int]) -> Plain:
    """A system call that does no more than the next of `pieces` bytes."""

    def call(descriptor: int, memory: list[memoryview], offset: int) -> int:
        return plain(descriptor, [memory[0][: next(pieces)]], offset)

    return call


@pytest.mark.parametrize(
    ("direct", "pieces"),
    [(True, [512, 4096, 1536, 8192]), (False, [1, 4095, 777, 4096])],
    ids=["direct", "buffered"],
)
def test_short_reads_and_writes_are_continued(
    tmp_path: Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    direct: bool,
    pieces: list[int],
) -> None:
    made = DiskFile.create(tmp_path, "states", 16 * BLOCK_BYTES)
    if direct and not made.direct:
        pytest.skip("no direct requests on this file system")
    # Opened again it goes through the kernel's cache.
    descriptor = (
        made.descriptor if direct else os.open(f"/proc/self/fd/{made.descriptor}", os.O_RDWR)
    )
    file = replace(made, descriptor=descriptor, direct=direct)
    monkeypatch.setattr(os, "preadv", in_pieces(os.preadv, itertools.cycle(pieces)))
    monkeypatch.setattr(os, "pwritev", in_pieces(os.pwritev, itertools.cycle(pieces)))
    source, place = buffers(7, 7)
    disk.write(file, 3 * BLOCK_BYTES, noise(source)).wait()
    disk.read(file, 3 * BLOCK_BYTES, place).wait()
    assert torch.equal(source, place)
    assert disk.read_bytes == disk.written_bytes == 7 * BLOCK_BYTES
    for number in {made.descriptor, descriptor}:
        os.close(number)


def test_a_direct_request_goes_on_at_a_sector(
    file: DiskFile, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a signal cut off in the middle of one is read again."""
    if not file.direct:
        pytest.skip("no direct requests on this file system")
    places: list[int] = []
    plain = os.preadv

    def cut(descriptor: int, memory: list[memoryview], offset: int) -> int:
        places.append(offset)
        return min(plain(descriptor, memory, offset), 1000)

    source, place = buffers(1, 1)
    disk.write(file, 0, noise(source)).wait()
    monkeypatch.setattr(os, "preadv", cut)
    disk.read(file, 0, place).wait()
    assert places == list(range(0, BLOCK_BYTES, 512))
    assert torch.equal(source, place)


def test_the_end_of_a_file_is_an_error(file: DiskFile, disk: Disk) -> None:
    """Somebody has cut it off: the kernel itself says that nothing comes."""
    os.ftruncate(file.descriptor, BLOCK_BYTES)
    (place,) = buffers(2)
    with pytest.raises(DiskError, match=r"states in .* ended at 4\.0 KiB of 64\.0 KiB"):
        disk.read(file, 0, place).wait()


def failing(plain: Plain, number: int, at: int) -> Plain:
    """A system call that fails at one offset."""

    def call(descriptor: int, memory: list[memoryview], offset: int) -> int:
        if offset == at:
            raise OSError(number, os.strerror(number))
        return plain(descriptor, memory, offset)

    return call


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("preadv", errno.EIO, ["could not be read", "Input/output error", "dmesg"]),
        ("pwritev", errno.EIO, ["could not be written", "Input/output error", "dmesg"]),
        ("pwritev", errno.ENOSPC, ["could not be written", "No space left", "make room"]),
    ],
)
def test_an_error_is_raised_where_it_is_waited_for_and_later_requests_go_on(
    file: DiskFile,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    words: list[str],
) -> None:
    request = disk.read if name == "preadv" else disk.write
    bad, good = buffers(1, 1)
    monkeypatch.setattr(os, name, failing(getattr(os, name), number, 2 * BLOCK_BYTES))
    arrivals = [
        request(file, place * BLOCK_BYTES, tensor) for place, tensor in ((2, bad), (5, good))
    ]
    with pytest.raises(TrainingError) as caught:
        arrivals[0].wait()
    for word in ("states in", str(file.folder), "8.0 KiB", "offload_folder", *words):
        assert word in str(caught.value)
    arrivals[1].wait()
    with pytest.raises(DiskError):
        disk.wait()
    disk.wait()  # told once
    request(file, 0, good).wait()


def test_wait_raises_only_after_everything_is_done(
    file: DiskFile, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody takes memory away that is still being read into."""
    failed, served = threading.Event(), threading.Event()
    plain = os.preadv

    def call(descriptor: int, memory: list[memoryview], offset: int) -> int:
        if offset == 0:
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        assert failed.wait(60)
        moved = plain(descriptor, memory, offset)
        served.set()
        return moved

    monkeypatch.setattr(os, "preadv", call)
    for number, place in enumerate(buffers(1, 1)):
        disk.read(file, number * BLOCK_BYTES, place)
    with pytest.raises(DiskError):
        disk.wait()
    assert served.is_set()


def test_slow_writes_do_not_stop_reads(
    file: DiskFile, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many writes as there are threads, and more, hang until a read that came after is done."""
    read_done = threading.Event()
    plain = os.pwritev

    def slow(descriptor: int, memory: list[memoryview], offset: int) -> int:
        assert read_done.wait(60)
        return plain(descriptor, memory, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    source, place = buffers(1, 1)
    writes = [disk.write(file, number * BLOCK_BYTES, noise(source)) for number in range(5)]
    disk.read(file, 9 * BLOCK_BYTES, place).wait()
    read_done.set()
    for write in writes:
        write.wait()
    assert disk.written_bytes == 5 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("offset", "first", "count"),
    [(1, 0, BLOCK_BYTES), (0, 512, BLOCK_BYTES), (0, 0, 512), (16 * BLOCK_BYTES, 0, BLOCK_BYTES)],
)
def test_what_a_direct_request_cannot_do_is_refused_at_once(
    file: DiskFile, disk: Disk, offset: int, first: int, count: int
) -> None:
    (memory,) = buffers(3)
    with pytest.raises(AssertionError):
        disk.read(file, offset, memory[first : first + count])
    with pytest.raises(AssertionError):
        disk.write(file, offset, memory[first : first + count])


def test_too_little_free_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    folder = tmp_path / "later" / "rank0"
    check_free(folder, free // 2)
    with pytest.raises(DoesNotFitError, match=r"are missing; make room.*offload_folder") as caught:
        check_free(folder, 4 * free)
    assert 2 * free < caught.value.missing_bytes < 4 * free
    assert str(folder) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DiskError, match=r"no file can be made in .*taken.*offload_folder"):
        DiskFile.create(tmp_path / "taken" / "rank0", "states", BLOCK_BYTES)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this process may mount one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_refuses_the_file(tiny_disk: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"2\.0 MiB of disk are needed") as caught:
        DiskFile.create(tiny_disk, "states", 2 * MIB)
    assert 0 < caught.value.missing_bytes <= 2 * MIB
    assert not list(tiny_disk.iterdir())
    file = DiskFile.create(tiny_disk, "states", MIB // 2)  # what was refused holds nothing
    file.close()


def test_a_disk_that_fills_up_under_a_file_is_named(tiny_disk: Path, disk: Disk) -> None:
    """One that grants more than it has, as thin volumes do: the kernel says so at the write."""
    with (tiny_disk / "sparse").open("wb+", buffering=0) as opened:
        opened.truncate(2 * MIB)
        file = DiskFile(tiny_disk, "states", 2 * MIB, opened.fileno(), direct=False)
        (source,) = buffers(2 * MIB // BLOCK_BYTES)
        with pytest.raises(DiskError, match="No space left on device; make room"):
            disk.write(file, 0, source).wait()


def test_an_error_of_the_kernel_itself_is_told(disk: Disk) -> None:
    """The memory of a process begins with a page that cannot be read: a real EIO."""
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    file = DiskFile(Path("/proc/self"), "mem", 4 * BLOCK_BYTES, descriptor, direct=False)
    (place,) = buffers(1)
    with pytest.raises(DiskError, match=r"mem in /proc/self could not be read.*Input/output error"):
        disk.read(file, 0, place).wait()
    file.close()


HOLDS_A_FILE = """
import sys
from pathlib import Path
import torch
from tightfit.bill.table import Kind
from tightfit.engine.disk import Disk, DiskFile
from tightfit.engine.slab import HostSlab

file = DiskFile.create(Path(sys.argv[1]), "states", 2**22)
slab = HostSlab(torch.device("cpu"))
place = slab.reserve((2**22,), torch.uint8, Kind.TRANSFER, align=4096)
slab.allocate()
disk = Disk()
disk.write(file, 0, place.tensor.fill_(1)).wait()
print("written", flush=True)
while True:
    disk.write(file, 0, place.tensor).wait()
    disk.read(file, 0, place.tensor).wait()
"""


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS_A_FILE, str(tmp_path / "rank0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list((tmp_path / "rank0").iterdir())
