"""Buffers, reading ahead, and files that the ledger counts."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.bill import on_disk
from tightfit.bill.on_disk import BLOCK_BYTES
from tightfit.bill.table import Kind
from tightfit.engine import pipeline
from tightfit.engine.disk import DiskError
from tightfit.engine.pipeline import BookedFile, Buffers, DiskTier, Part, ReadAhead, Writes
from tightfit.engine.slab import HostSlab
from tightfit.errors import DoesNotFitError
from tightfit.ledger import Ledger
from tightfit.policies import Tier

CPU = torch.device("cpu")


@given(st.integers(0, 5 * on_disk.PIECE_VALUES) | st.integers(0, 20_000))
def test_spans_cover_all_values_evenly(values: int) -> None:
    runs = on_disk.spans(values)
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs)][: len(runs)]
    assert (runs[-1][1] if runs else 0) == values
    sizes = [end - begin for begin, end in runs]
    assert all(0 < size <= on_disk.PIECE_VALUES for size in sizes)
    assert all(begin % 4096 == 0 for begin, _ in runs)
    assert len(runs) <= -(-values // on_disk.PIECE_VALUES)
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) == 0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """With six buffers of two blocks."""
    made = DiskTier(tmp_path)
    made.buffers.need(BLOCK_BYTES + 1)
    slab = HostSlab(CPU)
    made.buffers.reserve(slab)
    slab.allocate()
    yield made
    made.close()


def taken_from(buffers: Buffers) -> torch.Tensor:
    buffer = buffers.take()
    assert buffer is not None
    return buffer


def take_all(tier: DiskTier) -> list[torch.Tensor]:
    """All six buffers, and there are no more."""
    taken = [taken_from(tier.buffers) for _ in range(6)]
    assert tier.buffers.take(wait=False) is None
    return taken


def numbered(tier: DiskTier, blocks: int) -> BookedFile:
    """A file whose every block has its number in all bytes."""
    (file,) = tier.create({"numbers": {Kind.OPTIMIZER_STATES: blocks * BLOCK_BYTES}})
    for block in range(blocks):
        buffer = taken_from(tier.buffers)
        buffer.fill_(block)
        write = Part(file, block * BLOCK_BYTES, BLOCK_BYTES).write(buffer)
        write.wait()
        tier.buffers.give_back(buffer)
    return file


def test_pieces_come_in_order_with_all_their_parts(tier: DiskTier) -> None:
    file = numbered(tier, 20)
    pieces = [
        [
            Part(file, block * BLOCK_BYTES, BLOCK_BYTES),
            Part(file, (19 - block) * BLOCK_BYTES, BLOCK_BYTES, at_bytes=BLOCK_BYTES),
        ]
        for block in range(20)
    ]
    ahead = ReadAhead(tier.buffers, pieces)
    for block in range(20):
        with ahead.piece() as use:
            assert use.buffer.view(2, -1).unique(dim=1).view(-1).tolist() == [block, 19 - block]
            use.buffer.fill_(77)


def test_reading_goes_on_before_it_is_asked_for(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first piece is in use the next three are read, and no more."""
    file = numbered(tier, 6)
    plain, offsets, enough = os.preadv, [], threading.Event()

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset // BLOCK_BYTES)
        if len(offsets) == 4:
            enough.set()
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    ahead = ReadAhead(
        tier.buffers, [[Part(file, block * BLOCK_BYTES, BLOCK_BYTES)] for block in range(6)]
    )
    with ahead.piece():
        assert enough.wait(60)
        assert sorted(offsets) == [0, 1, 2, 3]
    ahead.close()


def test_a_buffer_that_is_written_is_not_given_away(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that takes until somebody else needs its buffer still writes what was there."""
    file = numbered(tier, 6)
    plain, wanted = os.pwritev, threading.Event()

    def write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert wanted.wait(60)
        return plain(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        buffers = take_all(tier)
        buffers[0].fill_(99)
        busy = Part(file, 0, BLOCK_BYTES).write(buffers[0])
        tier.buffers.give_back(buffers[0], [busy])
        found: list[torch.Tensor] = []

        def take() -> None:
            wanted.set()
            buffer = taken_from(tier.buffers)
            buffer.fill_(1)
            found.append(buffer)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(60)
    tier.buffers.give_back(found[0])
    with ReadAhead(tier.buffers, [[Part(file, 0, BLOCK_BYTES)]]).piece() as use:
        assert use.buffer[:BLOCK_BYTES].unique().tolist() == [99]


def test_who_needs_a_buffer_waits_for_one(tier: DiskTier) -> None:
    buffers = take_all(tier)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(taken_from(tier.buffers)))
    thread.start()
    tier.buffers.give_back(buffers[3])
    thread.join(60)
    assert found[0].data_ptr() == buffers[3].data_ptr()


@pytest.mark.parametrize("count", [2, 3, 6])
def test_two_users_never_wait_for_each_other(tmp_path: Path, count: int) -> None:
    """Both want more buffers than there are, and each goes on with those it has."""
    tier, slab = DiskTier(tmp_path), HostSlab(CPU)
    tier.buffers.need(BLOCK_BYTES)
    tier.buffers.reserve(slab, count)
    slab.allocate()
    file = numbered(tier, 8)
    pieces = [[Part(file, block % 8 * BLOCK_BYTES, BLOCK_BYTES)] for block in range(200)]
    seen: list[list[int]] = [[], []]
    both = threading.Barrier(2, timeout=60)

    def use_all(mine: list[int]) -> None:
        both.wait()
        ahead = ReadAhead(tier.buffers, pieces)
        for _ in pieces:
            with ahead.piece() as use:
                mine.append(int(use.buffer[-1]))

    threads = [threading.Thread(target=use_all, args=(mine,), daemon=True) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [[block % 8 for block in range(200)]] * 2
    tier.close()


@pytest.mark.parametrize("failing", range(6))
def test_a_piece_that_cannot_be_read_raises_when_its_turn_comes(
    failing: int, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = numbered(tier, 6)
    plain = os.preadv

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == failing * BLOCK_BYTES:
            raise OSError(5, "Input/output error")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    ahead = ReadAhead(
        tier.buffers, [[Part(file, block * BLOCK_BYTES, BLOCK_BYTES)] for block in range(6)]
    )
    for _ in range(failing):
        with ahead.piece():
            pass
    with pytest.raises(DiskError, match="Input/output error"), ahead.piece():
        pass
    ahead.close()
    assert len({buffer.data_ptr() for buffer in take_all(tier)}) == 6


def test_writes_tell_the_first_failure_soon(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the end, and not again when they were given up."""
    file = numbered(tier, 1)

    def refuse(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    writes, begun = Writes(), []

    def write_on() -> None:
        for _ in range(100):
            begun.append(Part(file, 0, BLOCK_BYTES).write(buffer))
            writes.add(begun[-1])

    buffer = taken_from(tier.buffers)
    with pytest.raises(DiskError, match="No space left"):
        write_on()
    assert len(begun) == pipeline.BUFFERS + 1
    writes.abandon()
    writes.finish()


def test_buffers_are_as_large_as_the_largest_need(tmp_path: Path) -> None:
    buffers, slab = Buffers(), HostSlab(CPU)
    for need in (10, 3 * BLOCK_BYTES - 1, 1):
        buffers.need(need)
    buffers.reserve(slab, count=4)
    assert slab.size_bytes == 4 * 3 * BLOCK_BYTES
    slab.allocate()
    taken = [taken_from(buffers) for _ in range(4)]
    assert buffers.take(wait=False) is None
    assert {buffer.numel() for buffer in taken} == {3 * BLOCK_BYTES}
    assert all(buffer.data_ptr() % BLOCK_BYTES == 0 for buffer in taken)


def test_files_are_made_only_when_all_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.engine.disk._free_bytes", lambda folder: 3 * BLOCK_BYTES)
    tier = DiskTier(tmp_path / "new")
    kinds = {Kind.MASTER_WEIGHTS: BLOCK_BYTES, Kind.OPTIMIZER_STATES: BLOCK_BYTES}
    with pytest.raises(DoesNotFitError, match="are missing"):
        tier.create({"a": kinds, "b": kinds})
    assert not (tmp_path / "new").exists()
    tier.close()


def test_the_ledger_counts_files(tier: DiskTier) -> None:
    kinds = {Kind.MASTER_WEIGHTS: 10 * BLOCK_BYTES, Kind.OPTIMIZER_STATES: BLOCK_BYTES}
    with Ledger() as counted:
        files = tier.create({"a": kinds, "b": {Kind.GRADIENTS: BLOCK_BYTES}})
        assert counted.kinds(Tier.NVME) == {**kinds, Kind.GRADIENTS: BLOCK_BYTES}
        assert counted.peak_bytes(Tier.DEVICE) == counted.peak_bytes(Tier.HOST) == 0
        del files
        assert counted.kinds(Tier.NVME) == {}


def test_a_dry_run_books_the_same_and_touches_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "pwritev")
    size_bytes = 10**15 // BLOCK_BYTES * BLOCK_BYTES
    with FakeTensorMode(), Ledger() as counted:  # type: ignore[no-untyped-call]
        tier, slab = DiskTier(tmp_path / "new"), HostSlab(CPU)
        (file,) = tier.create({"a": {Kind.OPTIMIZER_STATES: size_bytes}})
        tier.buffers.need(BLOCK_BYTES)
        tier.buffers.reserve(slab)
        slab.allocate()
        part = Part(file, size_bytes - BLOCK_BYTES, BLOCK_BYTES)
        with ReadAhead(tier.buffers, [[part]] * 20).piece() as use:
            use.busy.append(part.write(use.buffer))
        assert counted.kinds(Tier.NVME) == {Kind.OPTIMIZER_STATES: size_bytes}
        assert counted.kinds(Tier.HOST) == {Kind.TRANSFER: 6 * BLOCK_BYTES}
        assert tier.written_bytes == 0
    tier.close()
    assert not (tmp_path / "new").exists()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_tier_that_is_forgotten_gives_its_space_back(tmp_path: Path) -> None:
    """As when a fit runs out of memory and the next plan is tried in the same process."""
    gc.collect()
    before = open_files()
    tier = DiskTier(tmp_path)
    tier.create({"a": {Kind.GRADIENTS: BLOCK_BYTES}, "b": {Kind.GRADIENTS: BLOCK_BYTES}})
    assert open_files() == before + 2
    del tier
    gc.collect()
    assert open_files() == before


def test_a_tier_that_is_forgotten_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever collects it may be a thread that the end of another one has to wait for."""
    before, others, plain = open_files(), threading.enumerate(), os.preadv
    forgotten, seen = threading.Event(), []

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.append(forgotten.wait(5))
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    tier, slab = DiskTier(tmp_path), HostSlab(CPU)
    tier.buffers.need(BLOCK_BYTES)
    tier.buffers.reserve(slab)
    slab.allocate()
    (file,) = tier.create({"a": {Kind.GRADIENTS: BLOCK_BYTES}})
    buffer = tier.buffers.take()
    assert buffer is not None
    arrival = file.read(0, buffer)
    del tier, file
    gc.collect()
    forgotten.set()
    arrival.wait()
    assert seen == [True]
    del arrival
    for thread in set(threading.enumerate()) - set(others):
        thread.join(60)  # it ends by itself
    assert open_files() == before
