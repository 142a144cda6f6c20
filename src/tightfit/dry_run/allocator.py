"""torch's caching allocator replayed: what a card holds for tensors that come and go.

The rules of c10/cuda/CUDACachingAllocator.cpp for one stream: sizes are rounded up, small and
large blocks come from segments of their own, the smallest free block that is large enough is taken
and split, neighbours that are free are joined, segments stay until memory runs short. So
`reserved` is more than `allocated`, and allocated more than the tensors' bytes. Addresses are
made up; a driver's own only decide between blocks of equal size.

Tell it what a ledger sees on the device (`resize`); it knows nothing of tensors or models.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tightfit.units import MIB, format_bytes

BLOCK_BYTES = 512  # kMinBlockSize: every size is a multiple
SMALL_BYTES = MIB  # kSmallSize: up to here blocks come from small segments
_SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here a block gets a segment of its size
_SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge
_ADDRESS_SPACE_BYTES = _LARGE_SEGMENT_BYTES << 36  # of the small pool, before the large one's


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment; `before` and `after` are its neighbours in there."""

    pool: _Pool
    address: int
    size_bytes: int
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    @property
    def order(self) -> tuple[int, int]:
        return self.size_bytes, self.address


@dataclass(eq=False)
class _Pool:
    """Blocks of one kind of segment; `free` is sorted by size, then address.

    With expandable segments a pool has one, `last` is the block at its end and `end` that address.
    """

    small: bool
    end: int
    free: list[_Block] = field(default_factory=list)
    last: _Block | None = None

    @property
    def page_bytes(self) -> int:
        """What an expandable segment grows by."""
        return _SMALL_SEGMENT_BYTES if self.small else _LARGE_SEGMENT_BYTES

    def insert(self, block: _Block) -> None:
        bisect.insort(self.free, block, key=lambda b: b.order)

    def remove(self, block: _Block) -> None:
        del self.free[bisect.bisect_left(self.free, block.order, key=lambda b: b.order)]

    def take(self, size_bytes: int) -> _Block | None:
        """The smallest free block that is large enough."""
        index = bisect.bisect_left(self.free, (size_bytes, 0), key=lambda b: b.order)
        return self.free.pop(index) if index < len(self.free) else None


class CachingAllocator:
    """What torch's allocator holds while storages come, change and go.

    Args:
        capacity_bytes: what the card has for it. Where a segment would cross it, free segments go
            back to the driver first, as on a card.
        expandable_segments: as `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` asks for.

    Attributes:
        allocated_bytes: in blocks now; `max_allocated_bytes` is its peak.
        reserved_bytes: in segments now; `max_reserved_bytes` is its peak.
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, expandable_segments: bool = False
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._expandable = expandable_segments
        self._small = _Pool(small=True, end=0)
        self._large = _Pool(small=False, end=_ADDRESS_SPACE_BYTES)
        self._blocks: dict[int, tuple[_Block, int]] = {}
        self.allocated_bytes = self.max_allocated_bytes = 0
        self.reserved_bytes = self.max_reserved_bytes = 0

    def resize(self, key: int, count_bytes: int) -> None:
        """The storage `key` has so many bytes from now on; with 0 it is gone.

        A storage that grows is given another block before it leaves its own, as its content is
        copied.

        Raises:
            torch.OutOfMemoryError: the card has no such room, whatever is given back.
        """
        block, before_bytes = self._blocks.pop(key, (None, 0))
        if before_bytes == count_bytes and block is not None:
            self._blocks[key] = block, count_bytes
            return
        if count_bytes:
            self._blocks[key] = self._allocate(count_bytes), count_bytes
        if block is not None:
            self._free(block)

    def empty_cache(self) -> None:
        """Give free segments back to the driver; of expandable ones the pages that are free."""
        for pool in (self._small, self._large):
            for block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Address and end of every block that is taken."""
        return ((block.address, block.end) for block, _ in self._blocks.values())

    def _allocate(self, count_bytes: int) -> _Block:
        size = _round_up(count_bytes, BLOCK_BYTES)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.take(size) or self._grow(pool, size)
        rest = block.size_bytes - size
        if rest >= BLOCK_BYTES if pool.small or self._expandable else rest > SMALL_BYTES:
            _split(block, size)
        block.free = False
        self.allocated_bytes += block.size_bytes
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return block

    def _free(self, block: _Block) -> None:
        self.allocated_bytes -= block.size_bytes
        block.free = True
        _join_neighbours(block)
        block.pool.insert(block)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """A free block of at least `size` bytes from the driver, in no list."""
        if not self._has_room(self._growth_bytes(pool, size)):
            self.empty_cache()
        growth = self._growth_bytes(pool, size)
        if not self._has_room(growth):
            raise torch.OutOfMemoryError(
                f"{format_bytes(size)} do not fit: of {format_bytes(self._capacity_bytes or 0)} "
                f"{format_bytes(self.reserved_bytes)} are reserved and "
                f"{format_bytes(self.allocated_bytes)} in use"
            )
        self.reserved_bytes += growth
        self.max_reserved_bytes = max(self.max_reserved_bytes, self.reserved_bytes)
        block = _Block(pool, pool.end, growth)
        pool.end += growth
        if self._expandable:
            block.before, pool.last = pool.last, block
            if block.before is not None:
                block.before.after = block
            _join_neighbours(block)
        return block

    def _growth_bytes(self, pool: _Pool, size: int) -> int:
        if not self._expandable:
            return _segment_bytes(size)
        at_end = pool.last.size_bytes if pool.last is not None and pool.last.free else 0
        return _round_up(size - at_end, pool.page_bytes)

    def _has_room(self, growth_bytes: int) -> bool:
        return (
            self._capacity_bytes is None
            or self.reserved_bytes + growth_bytes <= self._capacity_bytes
        )

    def _unmap(self, block: _Block) -> None:
        """Give back the whole pages of a free block; what is left of it stays free."""
        pool, end = block.pool, block.end
        first = _round_up(block.address, pool.page_bytes)
        past = end // pool.page_bytes * pool.page_bytes
        if first >= past:
            return
        pool.remove(block)
        self.reserved_bytes -= past - first
        before, after = block.before, block.after
        left = right = None
        if block.address < first:
            left = _Block(pool, block.address, first - block.address, before=before)
            pool.insert(left)
        if past < end:
            right = _Block(pool, past, end - past, after=after)
            pool.insert(right)
        if before is not None:
            before.after = left
        if after is not None:
            after.before = right
        if pool.last is block:  # the hole is at the end, where it can be mapped again
            pool.last, pool.end = left or before, first


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return _round_up(size, _SEGMENT_ROUNDING_BYTES)


def _split(block: _Block, size: int) -> None:
    """Cut a block that is in no list to `size`; the rest becomes a free block behind it."""
    pool = block.pool
    rest = _Block(
        pool, block.address + size, block.size_bytes - size, before=block, after=block.after
    )
    if block.after is not None:
        block.after.before = rest
    if pool.last is block:
        pool.last = rest
    block.after, block.size_bytes = rest, size
    pool.insert(rest)


def _join_neighbours(block: _Block) -> None:
    """Make one of a block that is in no list and the free blocks on either side of it."""
    pool = block.pool
    if block.before is not None and block.before.free:
        left = block.before
        pool.remove(left)
        block.address, block.before = left.address, left.before
        block.size_bytes += left.size_bytes
        if left.before is not None:
            left.before.after = block
    if block.after is not None and block.after.free:
        right = block.after
        pool.remove(right)
        block.size_bytes += right.size_bytes
        block.after = right.after
        if right.after is not None:
            right.after.before = block
        if pool.last is right:
            pool.last = block


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
