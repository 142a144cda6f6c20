"""Where tensor-parallel ranks meet inside a forward: sums and gathers that autograd can follow.

A value is *whole* where every rank of the group has it all and the same, *divided* where each has
its part of a dimension, and *partial* where each has a summand. A forward goes from whole to
divided by `enter`, whose backward sums, and back by `leave`, which sums, or `gathered`
(https://arxiv.org/abs/1909.08053, section 3). Knows nothing of modules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tightfit import ledger
from tightfit.bill.table import Kind


def enter(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same values, for what each rank does differently: their gradients are summed."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    result: torch.Tensor = _Enter.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def leave(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over all ranks, in the memory of `partial`, which nobody else may hold."""
    result: torch.Tensor = _Leave.apply(partial, group)  # type: ignore[no-untyped-call]
    return result


def gathered(part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of the last dimension, cut as `torch.chunk` cuts, put together; `size` in all."""
    result: torch.Tensor = _Gather.apply(part, size, group)  # type: ignore[no-untyped-call]
    return result


def own_part(whole: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a dimension, a view, cut as `torch.chunk` cuts."""
    first, size = own_range(whole.shape[dim], group.size(), group.rank())
    return whole.narrow(dim, first, size)


def own_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first index and the length of a rank's part of `size`, cut as `torch.chunk` cuts."""
    chunk = -(-size // ranks)
    first = min(rank * chunk, size)
    return first, min(chunk, size - first)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(partial, group=group)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        chunk = -(-size // group.size())
        with ledger.labelled(Kind.COLLECTIVES):
            padded = torch.nn.functional.pad(part, (0, chunk - part.shape[-1])).contiguous()
            ranks, rows = group.size(), padded.shape[0]
            parts = padded.new_empty((ranks * rows, *padded.shape[1:]))
            dist.all_gather_single(parts, padded, group=group)
        whole = torch.cat(parts.split(rows), dim=-1)
        return whole if whole.shape[-1] == size else whole[..., :size].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(gradient, -1, ctx.group).contiguous(), None, None
