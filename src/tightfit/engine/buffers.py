"""Host buffers that are lent, returned and lent again, of no more bytes than were needed at once.

The first round's are pageable, made as they are asked for. Then it is known how many there are of
which size, and all of them become one piece of memory, page-locked with a card: between forwards,
when none is lent, and after the pageable ones are gone. So a round takes as many bytes as the next.
Knows nothing of what is put into them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest

import torch

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer


@dataclass(eq=False)
class Buffer:
    """Host memory, uint8 `[size_bytes]`, of which whoever it is lent to needs `needed_bytes`."""

    memory: torch.Tensor
    size_bytes: int
    needed_bytes: int = 0


class HostBuffers:
    """Buffers of one kind.

    A round is what is lent from one time that nothing is lent to the next. Any thread may give
    back, also in the middle of any other call, as collectors of garbage do; all else is one
    thread's.

    Args:
        kind: as what the ledger counts them, on the transfer's host tier, pageable ones too: they
            are there instead of the others, and a bill should not count both.
    """

    def __init__(self, transfer: Transfer, kind: Kind) -> None:
        self._transfer = transfer
        self._kind = kind
        self._free: list[Buffer] = []  # the smallest first
        self._lent: set[Buffer] = set()
        self._returned: deque[Buffer] = deque()  # put back to `_free` by the one thread
        self._needed: list[int] = []  # bytes of each buffer ever needed at once, the most first
        self._has_pageable = False

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return sum(buffer.size_bytes for buffer in (*self._free, *self._lent))

    @property
    def lent_bytes(self) -> int:
        """Bytes of the buffers that are lent."""
        self._take_back()
        return sum(buffer.size_bytes for buffer in self._lent)

    def lend(self, needed_bytes: int) -> Buffer:
        """A buffer of at least so many bytes: the smallest that is free, or else a new one.

        If the buffers of a round can be matched with its needs at all, the smallest that suffices,
        whatever the order, is a matching.
        """
        self._take_back()
        index = bisect_left(self._free, needed_bytes, key=_size_bytes)
        found = index < len(self._free)
        buffer = self._free.pop(index) if found else self._pageable(needed_bytes)
        buffer.needed_bytes = needed_bytes
        self._lent.add(buffer)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Let others have it; what is still being copied comes before what they copy."""
        self._returned.append(buffer)

    def note(self) -> None:
        """Remember what is lent now; call it when a round's most is lent."""
        self._take_back()
        lent = sorted((buffer.needed_bytes for buffer in self._lent), reverse=True)
        self._needed = [max(pair) for pair in zip_longest(self._needed, lent, fillvalue=0)]

    def settle(self) -> None:
        """If nothing is lent and some are pageable, make all of them anew as noted, in one piece.

        Raises:
            DoesNotFitError: as `HostSlab.allocate`.
        """
        self._take_back()
        if self._lent or not self._has_pageable:
            return
        self._transfer.wait()  # for what is still read from memory that now goes away
        self._free.clear()
        self._has_pageable = False
        slab = HostSlab(self._transfer.device)
        reserved = [slab.reserve((size,), torch.uint8, self._kind) for size in self._needed]
        slab.allocate()
        self._free = [Buffer(r.tensor, r.size_bytes) for r in reversed(reserved)]

    def _pageable(self, size_bytes: int) -> Buffer:
        with ledger.labelled(self._kind, self._transfer.host_tier):
            memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self._has_pageable = True
        return Buffer(memory, size_bytes)

    def _take_back(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._lent.remove(buffer)
            insort(self._free, buffer, key=_size_bytes)


def _size_bytes(buffer: Buffer) -> int:
    return buffer.size_bytes
