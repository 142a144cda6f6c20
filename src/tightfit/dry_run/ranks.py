"""A process group of one process that passes for many: collectives return at once, unsummed.

With it the engine shares a model out as one of so many ranks would, and allocates what that rank
would. FSDP2 cuts every parameter into the parts of all ranks to take its own: with a thousand of
them that would take most of the time, so here a part is cut when it is asked for. Knows nothing of
the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is a rank of `count`; with 1 it stays what it is.

    Enter it before fake tensors: what is made here lives longer than they do.

    Raises:
        RuntimeError: this process is a rank of a real process group. The two cannot stand side by
            side, so run the dry run in a process of its own.
    """
    if count == 1:
        yield
        return
    if dist.is_initialized():
        raise RuntimeError(
            "a dry run of several ranks inside a rank of a real process group; start a process "
            "for it"
        )
    shown, cut = sys.excepthook, _fsdp_param._chunk_with_empty  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    sys.excepthook = shown  # torch's puts the rank before every line, once for each group so far
    _fsdp_param._chunk_with_empty = Chunks  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = cut  # type: ignore[attr-defined]
        dist.destroy_process_group()


@dataclass(frozen=True)
class Chunks:
    """The `num_chunks` parts that `torch.chunk` cuts a tensor into, empty ones where it has no
    more; each is made when it is asked for."""

    tensor: torch.Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> torch.Tensor:
        """Part `index`: a view, or a tensor of its own where it is empty."""
        size = self.tensor.shape[self.dim]
        each = -(-size // self.num_chunks)
        begin = min(index * each, size)
        if begin == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(each, size - begin))
