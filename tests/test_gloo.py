"""What gloo was given is let go of when a collective returns, on real ranks, many times."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tightfit import gloo
from tightfit.ledger import Ledger
from tightfit.policies import Tier

RANKS = 2
TIMES = 200  # without waiting a quarter of them is late
NUMBERS = 1000


def gather() -> None:
    dist.all_gather_single(torch.empty(RANKS * NUMBERS), torch.ones(NUMBERS))


def scatter() -> None:
    dist.reduce_scatter_single(torch.empty(NUMBERS), torch.ones(RANKS * NUMBERS))


def reduce() -> None:
    dist.all_reduce(torch.ones(NUMBERS), dist.ReduceOp.MAX)


def gather_list() -> None:
    dist.all_gather([torch.empty(NUMBERS) for _ in range(RANKS)], torch.ones(NUMBERS))


def gather_objects() -> None:
    dist.all_gather_object([None] * RANKS, "x" * NUMBERS)


def send() -> None:
    dist.broadcast(torch.ones(NUMBERS), src=0)


COLLECTIVES: list[Callable[[], None]] = [
    gather, scatter, reduce, gather_list, gather_objects, send,
]  # fmt: skip


def one_rank(rank: int, folder: Path) -> None:
    """Writes how often something lived on, for each collective."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=1)
    )
    late = []
    with Ledger() as counting:
        for collective in COLLECTIVES:
            for _ in range(TIMES):
                collective()
                late += [collective.__name__] * (counting.total_bytes(Tier.DEVICE) > 0)
    (folder / f"late on {rank}").write_text(" ".join(late))
    dist.destroy_process_group()


def test_nothing_lives_on_in_threads_of_gloo(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=one_rank, args=(rank, tmp_path)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * RANKS
    assert [(tmp_path / f"late on {rank}").read_text() for rank in range(RANKS)] == [""] * RANKS


@pytest.fixture
def alone(tmp_path: Path) -> object:
    """A process group of one rank."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_somebody_else_takes_hold_of_is_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> None:
        kept.append(tensor.view(-1))

    monkeypatch.setattr(dist, "all_reduce", keep)
    monkeypatch.setattr(gloo, "_LONGEST_SECONDS", 0.01)
    with gloo.let_go_at_return():
        assert dist.all_reduce is not keep
        dist.all_reduce(torch.ones(1))
    assert dist.all_reduce is keep
    assert len(kept) == 1


@pytest.mark.usefixtures("alone")
def test_what_is_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `Work` holds the tensors for as long as the caller holds it."""
    monkeypatch.setattr(gloo, "_wait_until_let_go", lambda tensors, before: pytest.fail("waited"))
    with gloo.let_go_at_return():
        work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


def test_without_ranks_a_collective_says_what_it_always_does() -> None:
    with gloo.let_go_at_return(), pytest.raises(ValueError, match="process group"):
        dist.all_reduce(torch.ones(1))
