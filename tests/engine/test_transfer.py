"""Copies on the CPU, on a card whose streams are written down, and postponed as late as may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.engine.postponed import POISON_BYTE, PostponedTransfer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit.engine.transfer import THERE, Arrival, Transfer, _Road, host_tier_of
from tightfit.policies import Tier

CPU = torch.device("cpu")


def test_a_copy_on_the_cpu_is_there_at_once() -> None:
    transfer = Transfer(CPU)
    destination, source = torch.zeros(3), torch.arange(3.0)
    arrival = transfer.copy(destination, source)
    assert arrival is THERE
    assert torch.equal(destination, source)
    arrival.wait()
    arrival.order()
    transfer.wait()


def test_autograd_does_not_see_copies() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    Transfer(CPU).copy(parameter, (2 * torch.ones(3, requires_grad=True)))
    assert parameter.is_leaf
    assert parameter.tolist() == [2, 2, 2]


def test_what_travels_to_a_card_is_pinned() -> None:
    assert host_tier_of(torch.device("cuda", 1)) is Tier.PINNED
    assert host_tier_of(CPU) is Tier.HOST
    assert Transfer(CPU).host_tier is Tier.HOST


class Card:
    """Stands for `torch.cuda`: writes down what streams are given; ends when told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams: list[Card.Stream] = []
        self.main = self.make_stream(None)
        self.current = self.main
        self.finished: set[int] = set()
        self.events = 0

    class Stream:
        def __init__(self, card: Card, number: int) -> None:
            self.card, self.number, self.device = card, number, CPU

        def wait_stream(self, other: Card.Stream) -> None:
            self.card.log.append(f"{self.number} after {other.number}")

        def synchronize(self) -> None:
            self.card.finished.update(range(1, self.card.events + 1))
            self.card.log.append(f"wait for all of {self.number}")

        def wait_event(self, event: Card.Event) -> None:
            self.card.log.append(f"{self.number} after event {event.number}")

    class Event:
        def __init__(self, card: Card) -> None:
            card.events += 1
            self.card, self.number = card, card.events

        def record(self, stream: Card.Stream) -> None:
            self.card.log.append(f"event {self.number} on {stream.number}")

        def query(self) -> bool:
            return self.number in self.card.finished

        def synchronize(self) -> None:
            self.card.finished.add(self.number)
            self.card.log.append(f"wait {self.number}")

    def make_stream(self, device: torch.device | None) -> Card.Stream:
        self.streams.append(Card.Stream(self, len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Card.Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "Stream", card.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Card.Event(card))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: card.current)
    monkeypatch.setattr(torch.cuda, "stream", card.stream)
    return card


MAIN, SIDE = 0, 1  # the numbers of the first two streams that a `Card` makes


class Freed:
    """Whether nobody holds a tensor's memory any more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())

    def __bool__(self) -> bool:
        return bool(self._reference.expired())


def begin(road: _Road, *, ordered: bool = True) -> tuple[Arrival, Freed]:
    """A copy of which only the road and the arrival know the source."""
    source = torch.ones(4)
    return road.copy(torch.zeros(4), source, ordered), Freed(source)


def test_a_copy_is_ordered_after_the_current_stream(card: Card) -> None:
    begin(_Road(CPU))
    assert card.log == [f"{SIDE} after {MAIN}", f"event 1 on {SIDE}"]


def test_a_copy_that_is_not_ordered_waits_for_nothing(card: Card) -> None:
    begin(_Road(CPU), ordered=False)
    assert card.log == [f"event 1 on {SIDE}"]


def test_order_makes_the_current_stream_wait_and_the_host_not(card: Card) -> None:
    arrival, freed = begin(_Road(CPU))
    card.log.clear()
    assert not freed
    arrival.order()
    assert card.log == [f"{MAIN} after event 1"]
    assert freed


def test_memory_of_another_stream_is_held_until_the_copy_is_done(card: Card) -> None:
    road = _Road(CPU)
    arrival, freed = begin(road)
    with card.stream(card.make_stream(None)):
        arrival.order()
    assert not freed
    begin(road)
    assert not freed
    card.finished.add(1)
    begin(road)
    del arrival
    assert freed


def test_memory_is_held_when_nobody_keeps_the_arrival(card: Card) -> None:
    road = _Road(CPU)
    _, freed = begin(road)
    assert not freed
    road.wait()
    assert card.log[-2:] == [f"wait for all of {SIDE}", "wait 1"]
    assert freed


def test_wait_lets_the_memory_go(card: Card) -> None:
    arrival, freed = begin(_Road(CPU))
    arrival.wait()
    assert card.log[-1] == "wait 1"
    assert freed


def test_a_card_has_a_stream_for_each_direction(card: Card) -> None:
    transfer = Transfer(torch.device("cuda"))
    assert len(card.streams) == 3
    assert transfer.host_tier is Tier.PINNED
    with FakeTensorMode():  # a meta tensor can be copied to, a fake one on a card from
        transfer.copy(torch.empty(2), torch.empty(2, device="cuda"))
    assert card.log == [f"{SIDE} after {MAIN}", f"event 1 on {SIDE}"]
    transfer.copy(torch.empty(2, device="meta"), torch.zeros(2))
    assert card.log[2:] == [f"{SIDE + 1} after {MAIN}", f"event 2 on {SIDE + 1}"]
    transfer.wait()
    assert card.log[4::2] == [f"wait for all of {SIDE}", f"wait for all of {SIDE + 1}"]


def test_between_host_tensors_no_stream_is_needed(card: Card) -> None:
    transfer = Transfer(torch.device("cuda"))
    destination = torch.zeros(2)
    assert transfer.copy(destination, torch.ones(2)) is THERE
    assert destination.tolist() == [1, 1]
    assert not card.log


def test_a_host_destination_with_gaps_is_refused(card: Card) -> None:
    """torch would copy through a temporary, from the host's side before the card's is done."""
    with pytest.raises(AssertionError, match="torch would not wait"):
        _Road(CPU).copy(torch.zeros(4, 2)[:, 0], torch.ones(4), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8])
def test_postponed_copies_poison_until_they_arrive(dtype: torch.dtype) -> None:
    transfer = PostponedTransfer(CPU)
    destination, source = torch.zeros(2, 3, dtype=dtype), torch.full((2, 3), 7, dtype=dtype)
    arrival = transfer.copy(destination, source)
    if dtype.is_floating_point:
        assert destination.isnan().all()
    else:
        assert (destination.view(torch.uint8) == POISON_BYTE).all()
    source.fill_(9)  # too early: seen
    arrival.order()
    assert torch.equal(destination, torch.full((2, 3), 9, dtype=dtype))
    arrival.wait()
    assert transfer.pending == 0


def test_postponed_copies_arrive_in_their_order() -> None:
    transfer = PostponedTransfer(CPU)
    places = [torch.zeros(1) for _ in range(4)]
    arrivals = [transfer.copy(place, torch.ones(1)) for place in places]
    arrivals[1].wait()
    assert [bool(place.isnan()) for place in places] == [False, False, True, True]
    arrivals[0].wait()
    transfer.wait()
    assert all(place.item() == 1 for place in places)
    assert transfer.most_pending == 4


@pytest.mark.parametrize(
    ("destination", "source", "complaint"),
    [(4, 0, "has not arrived"), (8, 4, "being copied"), (0, 8, "one place")],
)
def test_postponed_copies_refuse_what_is_under_way(
    destination: int, source: int, complaint: str
) -> None:
    memory = torch.arange(12.0)
    transfer = PostponedTransfer(CPU)
    transfer.copy(memory[0:4], memory[8:12])
    with pytest.raises(AssertionError, match=complaint):
        transfer.copy(memory[destination : destination + 4], memory[source : source + 4])


def test_a_parameter_that_arrives_late_does_not_disturb_autograd() -> None:
    transfer = PostponedTransfer(CPU)
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.autograd._unsafe_preserve_version_counter(parameter):
        arrival = transfer.copy(parameter, torch.full((2,), 3.0))
    loss = (parameter * torch.ones(2, requires_grad=True)).sum()
    arrival.wait()
    loss.backward()
    assert parameter.tolist() == [3, 3]


def test_threads_may_copy_and_wait_at_once() -> None:
    transfer = PostponedTransfer(CPU)
    places = [[torch.zeros(8) for _ in range(100)] for _ in range(3)]

    def work(mine: list[torch.Tensor]) -> None:
        arrivals = [transfer.copy(place, torch.ones(8)) for place in mine]
        for arrival in reversed(arrivals):
            arrival.wait()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((place == 1).all()) for mine in places for place in mine)
