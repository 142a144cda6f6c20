"""What goes round a ring of ranks is what gloo's own collectives give, in no memory beside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tightfit.bill.table import Kind
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.rings import gather, goes_round, scatter_sum
from tightfit.ledger import Ledger
from tightfit.policies import Tier

PART = 5
Forked = Callable[[Callable[[int], Any], int], list[Any]]


def values(rank: int, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank begins with, `[ranks * PART]`, such that sums are exact in any order."""
    return (torch.arange(ranks * PART) + 16 * rank).to(dtype)


def taken_bytes(send: Callable[..., None], *tensors: torch.Tensor) -> int:
    """The most that `send` has taken beside the tensors that it was given."""
    with Ledger() as counter:
        for tensor in tensors:
            counter.mark(tensor, Kind.COLLECTIVES)
        given = counter.total_bytes(Tier.DEVICE)
        send(*tensors, world())
        return counter.peak_bytes(Tier.DEVICE) - given


def world() -> ProcessGroup:
    """All ranks."""
    assert isinstance(dist.group.WORLD, ProcessGroup)
    return dist.group.WORLD


def gather_all(rank: int) -> list[Any]:
    assert goes_round(torch.empty(0), world())
    ranks = world().size()
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        whole = torch.zeros(ranks * PART, dtype=dtype)
        whole.chunk(ranks)[rank].copy_(values(rank, 1, dtype))
        taken = taken_bytes(gather, whole)
        found.append((whole.tolist(), taken))
    return found


def sum_all(rank: int) -> list[Any]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        part, whole = torch.zeros(PART, dtype=dtype), values(rank, world().size(), dtype)
        taken = taken_bytes(scatter_sum, part, whole)
        found.append((part.tolist(), taken))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_part_comes_to_every_rank(forked_ranks: Forked, ranks: int) -> None:
    expected = torch.cat([values(rank, 1, torch.float32) for rank in range(ranks)]).tolist()
    for found in forked_ranks(gather_all, ranks):
        assert found == [(expected, 0)] * 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_the_sum_of_its_part(forked_ranks: Forked, ranks: int) -> None:
    total = torch.stack([values(rank, ranks, torch.float32) for rank in range(ranks)]).sum(0)
    for found, expected in zip(forked_ranks(sum_all, ranks), total.chunk(ranks), strict=True):
        assert found == [(expected.tolist(), 0)] * 2


def test_fake_ranks_send_nothing() -> None:
    with fake_ranks(4):
        assert not goes_round(torch.empty(0), world())
