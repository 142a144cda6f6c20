"""Measurements on this CPU, and on a card that is played by stand-ins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tightfit.planner import measure

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
QUICK = 0.001


@pytest.mark.parametrize(
    "rate",
    [
        lambda: measure.matmul_rate(CPU, torch.float32, 32, seconds=QUICK),
        lambda: measure.memory_rate(CPU, QUICK),
        lambda: measure.host_copy_rate(QUICK),
        lambda: measure.copy_rate(CPU, QUICK),
        lambda: measure.optimizer_rate(CPU, QUICK),
        lambda: measure.operation_seconds(CPU, QUICK),
    ],
)
def test_this_cpu(rate: Callable[[], float]) -> None:
    assert rate() > 0


def test_products_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bf16 on a CPU without instructions for it a wide product takes minutes."""
    tried: list[int] = []

    def rate(device: torch.device, dtype: torch.dtype, width: int, *, seconds: float) -> float:
        tried.append(width)
        return 9e8

    monkeypatch.setattr(measure, "matmul_rate", rate)
    rates = measure.matmul_rates(CPU, torch.bfloat16, (2048, 64, 256), most_seconds=0.25)
    assert rates == {64: 9e8, 256: 9e8}
    assert tried == [64, 256]


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"), True),
        (torch.OutOfMemoryError("full"), True),
        (RuntimeError("the card is broken"), False),
    ],
)
def test_what_torch_cannot_multiply_is_left_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception, known: bool
) -> None:
    def rate(*given: object, **named: object) -> float:
        raise error

    monkeypatch.setattr(measure, "matmul_rate", rate)
    if known:
        assert measure.matmul_rates(CPU, torch.float16, (64,), most_seconds=1) == {}
    else:
        with pytest.raises(RuntimeError, match="broken"):
            measure.matmul_rates(CPU, torch.float16, (64,), most_seconds=1)


def test_a_call_that_is_late_once_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that others delay made the first timed call 500 times as long."""
    taken = iter([0.5, 0.002, 0.001, 0.002])
    monkeypatch.setattr(measure, "_host_seconds", lambda call, calls: next(taken))
    clock = iter([0.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.seconds_per_call(lambda: None, CPU, 0.02) == 0.002


class FakeEvent:
    """CUDA's clock, in which every call of the work takes 10 microseconds."""

    calls = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        self.at = FakeEvent.calls

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end: FakeEvent) -> float:
        return 0.01 * (end.at - self.at)


def test_on_a_card_many_short_calls_lie_between_two_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    between: list[int] = []
    card_seconds = measure._card_seconds
    monkeypatch.setattr(
        measure,
        "_card_seconds",
        lambda call, calls: between.append(calls) or card_seconds(call, calls),
    )

    def work() -> None:
        FakeEvent.calls += 1

    found = measure.seconds_per_call(work, CARD, QUICK)
    assert found == pytest.approx(1e-5)
    assert between[0] == 1
    assert set(between[1:]) == {100}


def test_buffers_are_a_small_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 80 * 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 0))
    assert measure.buffer_bytes(CARD) == 512 * 2**20
    free["bytes"] = 160 * 2**20
    assert measure.buffer_bytes(CARD) == 10 * 2**20
    free["bytes"] = 0
    assert measure.buffer_bytes(CARD) == 2**20


def test_both_directions_go_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream, whose events are read, begins before both and ends after both."""
    done: list[str] = []

    class FakeStream:
        def __init__(self, name: str = "") -> None:
            self.name = name or f"side{FakeStream.made}"
            FakeStream.made += not name

        made = 0

        def wait_stream(self, other: FakeStream) -> None:
            done.append(f"{self.name} waits for {other.name}")

    class Using:
        def __init__(self, stream: FakeStream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            done.append(f"copies on {self.stream.name}")

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", Using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("main"))
    source, target = torch.ones(2), torch.zeros(2)
    other_source, other_target = torch.ones(2), torch.zeros(2)
    measure._both_at_once((target, source), (other_target, other_source))()
    assert torch.equal(target, source)
    assert torch.equal(other_target, other_source)
    assert done == [
        "side0 waits for main",
        "copies on side0",
        "side1 waits for main",
        "copies on side1",
        "main waits for side0",
        "main waits for side1",
    ]


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with measure.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
