"""FSDP2's gathers and sums between ranks on CPUs, in the memory that FSDP2 gives and in no other.

gloo gathers into a buffer of its own and copies it, and for a sum of parts it sums everything on
every rank, in a clone. Here the ranks are a ring: each sends to the next what the one before has
just sent it, until every part has come round (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms", section 4). Of N ranks each sends (N - 1) / N of the whole, which is the
least there is, and half of what gloo sends for a sum. Knows nothing of parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tightfit.engine.stage_ranks import swap


def goes_round(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether gloo would send it: others have rings of their own, and fake ranks send nothing."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather(whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Have every rank's part everywhere.

    Args:
        whole: a part of each rank, in their order, of the same size; this rank's is there.
    """
    ranks, rank = group.size(), group.rank()
    parts = whole.chunk(ranks)
    for step in range(ranks - 1):
        _pass_on(parts[(rank - step) % ranks], parts[(rank - step - 1) % ranks], group)


def scatter_sum(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum the same part of every rank's `whole`, for each rank another one.

    A part is added up rank by rank, beginning with the one after its owner.

    Args:
        part: becomes this rank's sum.
        whole: a part for each rank, in their order, of the same size; it is used up.
    """
    ranks, rank = group.size(), group.rank()
    parts = whole.chunk(ranks)
    for step in range(1, ranks):
        _pass_on(parts[(rank - step) % ranks], part, group)
        parts[(rank - step - 1) % ranks].add_(part)
    part.copy_(parts[rank])


def _pass_on(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank what is the same size as what comes from the one before."""
    ranks, rank = group.size(), group.rank()
    swap(group, [((rank + 1) % ranks, sent)], [((rank - 1) % ranks, received)])
