"""A process group of one process that passes for many: collectives return at once, unsummed.

With it the engine shares a model out as one of so many ranks would, and allocates what that rank
would. Knows nothing of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
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
    shown = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    sys.excepthook = shown  # torch's puts the rank before every line, once for each group so far
    try:
        yield
    finally:
        dist.destroy_process_group()
