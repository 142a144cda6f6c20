"""What a rank waits for others is counted, on a CPU with real ranks and on a card's streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tightfit.dry_run.ranks import fake_ranks
from tightfit.monitor.communication import CommunicationWatch

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
LATE_SECONDS = 0.1
Forked = Callable[[Callable[[int], Any], int], list[Any]]


def wait_for_the_late_one(number: int) -> dict[str, float]:
    watch = CommunicationWatch(CPU)
    before = dist.Work.wait, dist.ProcessGroup.allreduce
    dist.barrier()
    with watch.counting():
        begin = time.perf_counter()
        end = begin + LATE_SECONDS
        while number == 1 and time.perf_counter() < end:
            pass  # it computes, and the other waits
        called = time.perf_counter()
        work = dist.all_reduce(torch.ones(8), async_op=True)
        dist.all_reduce(torch.ones(8))
        work.wait()
        done = time.perf_counter()
    dist.all_reduce(torch.ones(8))  # of no step
    assert (dist.Work.wait, dist.ProcessGroup.allreduce) == before
    return {"called": called, "waited": watch.take_seconds(), "inside": done - called,
            "again": watch.take_seconds()}  # fmt: skip


def test_a_rank_waits_until_the_last_one_comes(forked_ranks: Forked) -> None:
    """Both read the same clock: no collective ends before the late rank has called it."""
    early, late = forked_ranks(wait_for_the_late_one, 2)
    assert early["waited"] >= late["called"] - early["called"] - 1e-3
    for rank in (early, late):
        assert 0 < rank["waited"] <= rank["inside"], "computing does not count"
        assert rank["again"] == 0


def shard_and_step(number: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    watch = CommunicationWatch(CPU)
    with watch.counting():
        model(torch.ones(4, 64)).sum().backward()
    counted = len(watch._waits)
    return {"waits": counted, "seconds": watch.take_seconds()}


def test_it_sees_what_fsdp_does_in_forward_and_backward(forked_ranks: Forked) -> None:
    for rank in forked_ranks(shard_and_step, 2):
        # Two layers are gathered twice, or once where the second stays whole, and scattered once.
        assert rank["waits"] >= 2 * (3 + 2)
        assert rank["seconds"] > 0


def test_one_rank_waits_for_nobody() -> None:
    before = dist.Work.wait
    watch = CommunicationWatch(CPU)
    with watch.counting():
        assert dist.Work.wait is before
    assert watch.take_seconds() == 0


def test_all_is_put_back_after_an_error() -> None:
    before = dist.Work.wait, dict(vars(dist.ProcessGroup))
    with fake_ranks(2), pytest.raises(KeyError), CommunicationWatch(CPU).counting():
        raise KeyError
    assert (dist.Work.wait, dict(vars(dist.ProcessGroup))) == before


class FakeCard:
    """A card's streams with a clock that each wait turns on by what the test says."""

    now_ms = 0.0
    waits_ms = 0.0
    current: FakeStream
    running = False  # whether what was given to the card is not done yet


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at_ms = 0.0

    def record(self, stream: FakeStream) -> None:
        self.at_ms = FakeCard.now_ms

    def query(self) -> bool:
        return not FakeCard.running

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


class FakeStream:
    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def wait_event(self, event: FakeEvent) -> None:
        FakeCard.now_ms += FakeCard.waits_ms


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The compute stream of a card that is not there."""
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeCard.current)
    for name, value in {
        "current": stream,
        "now_ms": 0.0,
        "waits_ms": 0.0,
        "running": False,
    }.items():
        monkeypatch.setattr(FakeCard, name, value, raising=False)
    return stream


def test_a_card_waits_where_its_compute_stream_waits_for_something_sent(
    compute: FakeStream,
) -> None:
    sending, copying = FakeStream(), FakeStream()
    watch = CommunicationWatch(CARD)
    with fake_ranks(2), watch.counting():
        FakeCard.current = sending
        dist.all_reduce(torch.ones(1))
        FakeCard.current, FakeCard.waits_ms = compute, 7.0
        compute.wait_event(sending.record_event())
        FakeCard.waits_ms = 100.0
        compute.wait_event(copying.record_event())  # nothing that was sent
        copying.wait_event(sending.record_event())  # not where it computes
    assert watch.take_seconds() == pytest.approx(0.007)


def test_a_card_is_not_waited_for(compute: FakeStream) -> None:
    """What is not over when a step is read counts with the next."""
    watch = CommunicationWatch(CARD)
    with fake_ranks(2), watch.counting():
        FakeCard.current = sending = FakeStream()
        dist.all_reduce(torch.ones(1))
        FakeCard.current, FakeCard.waits_ms, FakeCard.running = compute, 3.0, True
        compute.wait_event(sending.record_event())
        assert watch.take_seconds() == 0
        FakeCard.running = False
        assert watch.take_seconds() == pytest.approx(0.003)
        assert watch.take_seconds() == 0
