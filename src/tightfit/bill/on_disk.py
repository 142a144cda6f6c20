"""How things lie on a disk, and closed forms of their bytes: whole blocks, in two places each.

A parameter is cut into pieces, and each has one record with its states side by side. Knows nothing
of which states there are, or of what else a disk is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.bill.optimizers import BLOCK_8BIT
from tightfit.bill.shards import ceil_divide

SLOTS = 2  # what is current, and what the step that runs makes of it
BLOCK_BYTES = 4096  # places, sizes and buffers of direct requests are multiples of this
PIECE_VALUES = 2**21  # of a parameter; with fp32 states and gradient 32 MiB, a disk's full rate
_ALIGN_BYTES = 64  # of each state in a record


def whole_blocks(size_bytes: int) -> int:
    """As many bytes in whole blocks of a disk."""
    return ceil_divide(size_bytes, BLOCK_BYTES) * BLOCK_BYTES


def record_bytes(values: int, widths: Sequence[int], *, scales: int = 0) -> int:
    """Bytes of a parameter's records in one slot.

    Args:
        values: of the parameter, or of the part that a rank has.
        widths: bytes per value of each state.
        scales: how many of the states have an fp32 scale for each block of values, apart.
    """
    total = 0
    for begin, end in spans(values):
        fields = [width * (end - begin) for width in widths]
        fields += [4 * ceil_divide(end - begin, BLOCK_8BIT)] * scales
        aligned = (ceil_divide(size, _ALIGN_BYTES) * _ALIGN_BYTES for size in fields)
        total += whole_blocks(sum(aligned))
    return total


def spans(values: int) -> list[tuple[int, int]]:
    """Even runs `[begin, end)` of at most `PIECE_VALUES`; none of no values.

    Each begins at a multiple of 4096 values: of any type that is where a disk's block begins, and a
    block of 8-bit moments, and where vectorised arithmetic on the whole would begin a vector.
    """
    if values == 0:
        return []
    even = ceil_divide(values, ceil_divide(values, PIECE_VALUES))
    run = ceil_divide(even, BLOCK_BYTES) * BLOCK_BYTES
    return [(begin, min(begin + run, values)) for begin in range(0, values, run)]
