"""Companded moments of 8 bits: values are compressed, rounded to one of 255 steps, and expanded.

The functions are those of FlashOptim (https://arxiv.org/abs/2602.23349): 2x / (1 + |x|) for a
moment of both signs, the root for one that is never negative. Blocks and their fp32 scales are
those of `moments.py`; the paper has 16-bit scales of 32 values, which take four times the bytes for
a fifth less error. Unlike the paper's, a moment that is never negative and not 0 does not become 0,
as updates divide by its root: where a block has many magnitudes that saves a third of the error.
Allocates nothing. Knows nothing of optimizers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tightfit.engine.moments import SMALLEST_SCALE, blocks, scale_by_peaks

_STEPS = 127  # on either side of 0, which is the code 128
_MIDDLE = 128
_ROOT_STEPS = 255


class Softsign:
    """A moment of both signs, as `moments.Code`."""

    def widen(self, codes: Tensor, scales: Tensor, out: Tensor, work: Tensor) -> None:
        """z / (2 - |z|) of z in [-1, 1]."""
        out.copy_(codes).sub_(_MIDDLE).div_(_STEPS)
        below = work[: out.numel()]
        torch.abs(out, out=below)
        out.div_(below.neg_().add_(2))
        for values, of_block in blocks(out, scales):
            values.mul_(of_block)

    def narrow(self, values: Tensor, codes: Tensor, scales: Tensor, work: Tensor) -> None:
        """2x / (1 + |x|) of x in [-1, 1], rounded."""
        scale_by_peaks(values, scales, work)
        below = work[: values.numel()]
        torch.abs(values, out=below)
        values.div_(below.add_(1)).mul_(2 * _STEPS).round_()
        codes.copy_(values.add_(_MIDDLE))


class Root:
    """A moment that is never negative, as `moments.Code`; scales are of its root."""

    def widen(self, codes: Tensor, scales: Tensor, out: Tensor, work: Tensor) -> None:
        """The square."""
        out.copy_(codes).div_(_ROOT_STEPS)
        for values, of_block in blocks(out, scales):
            values.mul_(of_block)
        out.square_()

    def narrow(self, values: Tensor, codes: Tensor, scales: Tensor, work: Tensor) -> None:
        """The root, rounded; at least one step of what is not 0."""
        values.sqrt_()
        for part, of_block in blocks(values, scales):
            torch.amax(part, dim=1, keepdim=True, out=of_block)
        scales.clamp_(min=SMALLEST_SCALE)
        least = work[: values.numel()]
        torch.sign(values, out=least)
        for part, of_block in blocks(values, scales):
            part.div_(of_block)
        torch.maximum(values.mul_(_ROOT_STEPS).round_(), least, out=values)
        codes.copy_(values)
