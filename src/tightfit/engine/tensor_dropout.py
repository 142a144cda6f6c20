"""Dropout where a tensor group's ranks have parts of what is dropped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tightfit.engine.collectives import own_part


class PartOfDropout(nn.Module):
    """Dropout of a divided input, drawn as for all of it, so that ranks draw alike.

    Args:
        probability: of a value to be dropped.
        width: of the whole input.
    """

    def __init__(self, probability: float, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._probability = probability
        self._width = width
        self._group = group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """`[..., part of width]` to the same."""
        if not self.training:
            return part
        ones = part.new_ones(*part.shape[:-1], self._width)
        kept = nn.functional.dropout(ones, self._probability)
        return part * own_part(kept, -1, self._group)
