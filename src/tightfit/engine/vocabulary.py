"""Which rows of the output layer, and so which logits, a rank has.

Ranks of a tensor group have a part of the vocabulary each; what a loss needs of all of it, the
highest logit and a few sums for each token, they find out together. Knows nothing of losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tightfit.engine.collectives import enter


@dataclass(frozen=True)
class Vocabulary:
    """All of it, or with a group this rank's part.

    Attributes:
        first_row: of the output layer's weight that this rank has.
        group: the ranks that have the others; None: there are no others.
    """

    first_row: int = 0
    group: dist.ProcessGroup | None = None

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states whose gradients are added up over the parts."""
        return hidden if self.group is None else enter(hidden, self.group)

    def within(self, targets: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets are among some rows of this rank, and where there; 0 for others.

        Args:
            targets: `[tokens]`, numbers of the whole vocabulary, or negative.
            rows: of this rank's part.
        """
        first = self.first_row + rows.start
        inside = (targets >= first) & (targets < self.first_row + rows.stop)
        return inside, torch.where(inside, targets - first, 0)

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """The highest of all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter; its gradient is that of the part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
