"""Moments of 8 bits: a code per value and an fp32 scale per block of 256 values.

The codes of this module are those of bitsandbytes' 8-bit optimizers
(https://arxiv.org/abs/2110.02861); others are in `companding.py`. Encoding looks the upper 16 bits
of a value up in a table, since a search takes fifty times as long on a CPU: a value within 1/256 of
the middle between two codes may get the farther one. A moment that is never
negative and not 0 does not become 0 either, as updates divide by its root. Allocates nothing but
the tables. Knows nothing of optimizers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from tightfit.bill.optimizers import BLOCK_8BIT

WORK_BUFFERS = 2  # fp32 values of work memory for each value
_DECADES = 7
_KEYS = 2**16  # upper halves of an fp32 value
# A scale no smaller keeps 0/0 away and is an ordinary fp32 value.
SMALLEST_SCALE = 1e-37


class Code(Protocol):
    """What the codes of a moment stand for."""

    def widen(self, codes: Tensor, scales: Tensor, out: Tensor, work: Tensor) -> None:
        """Fill `out`.

        Args:
            codes: uint8 `[values]`.
            scales: fp32 `[blocks]`; the last block may be short.
            out: fp32 `[values]`.
            work: fp32, at least `[WORK_BUFFERS * values]`, overwritten.
        """

    def narrow(self, values: Tensor, codes: Tensor, scales: Tensor, work: Tensor) -> None:
        """Fill `codes` and `scales` with what comes nearest to `values`, which is overwritten.

        Shapes are those of `widen`.
        """


@dataclass(frozen=True)
class Table:
    """A `Code` by look-up: `decode` is fp32 `[256]`, `encode` uint8 `[65536]`."""

    decode: Tensor
    encode: Tensor

    def widen(self, codes: Tensor, scales: Tensor, out: Tensor, work: Tensor) -> None:
        """See `Code.widen`."""
        index = work[: 2 * codes.numel()].view(torch.int64)
        index.copy_(codes)
        torch.index_select(self.decode, 0, index, out=out)
        for values, of_block in blocks(out, scales):
            values.mul_(of_block)

    def narrow(self, values: Tensor, codes: Tensor, scales: Tensor, work: Tensor) -> None:
        """See `Code.narrow`."""
        scale_by_peaks(values, scales, work)
        index = values.view(torch.int32)
        index.bitwise_right_shift_(16).add_(_KEYS // 2)
        torch.index_select(self.encode, 0, index, out=codes)


def make_table(device: torch.device, *, signed: bool) -> Table:
    """The table of moments of both signs, or of those that are never negative; 65 KiB."""
    return Table(
        torch.tensor(dynamic_map(signed=signed), dtype=torch.float32, device=device),
        torch.tensor(_encode(signed=signed), dtype=torch.uint8, device=device),
    )


@cache
def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """256 values in [-1, 1], or in [0, 1], in rising order: dense near 0, even in each decade.

    The dynamic tree type of https://arxiv.org/abs/1511.04561: seven decades up to 1, each with
    twice as many levels as the one below, the middles of equal steps. Signed, decades have half
    as many for each sign.
    """
    positive: list[float] = []
    for decade in range(_DECADES):
        levels = 2 ** (decade if signed else decade + 1)
        step = 0.9 / levels
        size = 10.0 ** (decade - _DECADES + 1)
        positive += [size * (0.1 + step * (level + 0.5)) for level in range(levels)]
    negative = [-value for value in reversed(positive)] if signed else []
    return (*negative, 0.0, *positive, 1.0)


@cache
def _encode(*, signed: bool) -> tuple[int, ...]:
    """A code for each upper half of an fp32 value, in its order as a signed number, negative first.

    It is the one nearest to the middle of all values with that half.
    """
    values = dynamic_map(signed=signed)
    borders = [(low + high) / 2 for low, high in pairwise(values)]
    if not signed:
        borders[0] = 0.0
    halves = range(-_KEYS // 2, _KEYS // 2)
    codes = [bisect_left(borders, _middle(half)) for half in halves]
    codes[_KEYS // 2] = values.index(0.0)  # the half of 0 itself
    return tuple(codes)


def _middle(half: int) -> float:
    """The middle of all fp32 values whose upper 16 bits are `half`."""
    value: float = struct.unpack("<f", struct.pack("<Hh", 0x8000, half))[0]
    return value


def scale_by_peaks(values: Tensor, scales: Tensor, work: Tensor) -> None:
    """Bring `values` to [-1, 1]: `scales` become the largest magnitudes of their blocks.

    Shapes are those of `Code.narrow`.
    """
    magnitudes = work[: values.numel()]
    torch.abs(values, out=magnitudes)
    for absolute, of_block in blocks(magnitudes, scales):
        torch.amax(absolute, dim=1, keepdim=True, out=of_block)
    scales.clamp_(min=SMALLEST_SCALE)
    for part, of_block in blocks(values, scales):
        part.div_(of_block)


def blocks(values: Tensor, scales: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    """`values` by blocks, `[blocks, 256]` and what is left `[1, rest]`, with scales `[.., 1]`."""
    whole = values.numel() // BLOCK_8BIT
    parts = [(values[: whole * BLOCK_8BIT].view(whole, BLOCK_8BIT), scales[:whole].unsqueeze(1))]
    if whole < scales.numel():
        parts.append((values[whole * BLOCK_8BIT :].unsqueeze(0), scales[whole:].unsqueeze(1)))
    return [part for part in parts if part[0].numel()]
