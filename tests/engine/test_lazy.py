"""Updates that go on in a thread; threads are held back with events, never with time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tightfit.engine.lazy import DueUpdates
from tightfit.engine.units import Unit

FIRST, SECOND = (Unit(name, (), (), is_layer=True) for name in ("first", "second"))


@pytest.fixture
def due() -> Iterator[DueUpdates]:
    due = DueUpdates(lazy=True)
    yield due
    due.close()


def test_updates_are_done_at_once_without_a_thread() -> None:
    done: list[str] = []
    due = DueUpdates(lazy=False)
    due.add(FIRST, lambda: done.append(threading.current_thread().name))
    assert done == [threading.current_thread().name]
    due.wait(FIRST)
    due.drain()
    due.close()


def test_a_unit_waits_for_its_own_update_and_not_for_later_ones(due: DueUpdates) -> None:
    done: list[str] = []
    hold = threading.Event()
    due.add(FIRST, lambda: done.append("first"))
    due.add(SECOND, lambda: done.append("second") if hold.wait(60) else None)
    due.wait(FIRST)
    assert done == ["first"]
    hold.set()
    due.wait(SECOND)
    assert done == ["first", "second"]


def test_draining_waits_for_all_in_the_order_in_which_they_came(due: DueUpdates) -> None:
    done: list[int] = []
    for number in range(20):
        due.add((FIRST, SECOND)[number % 2], lambda number=number: done.append(number))
    due.drain()
    assert done == list(range(20))


def test_an_error_reaches_whoever_waits_first_and_nothing_is_done_after_it(
    due: DueUpdates,
) -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError("the disk is gone")

    due.add(FIRST, fail)
    due.add(SECOND, lambda: done.append("second"))
    with pytest.raises(OSError, match="the disk is gone"):
        due.wait(SECOND)
    with pytest.raises(OSError, match="the disk is gone"):
        due.drain()
    assert not done


def test_the_thread_is_prepared_once() -> None:
    prepared: list[str] = []
    due = DueUpdates(lazy=True, prepare_thread=lambda: prepared.append("once"))
    for _ in range(3):
        due.add(FIRST, lambda: None)
    due.drain()
    due.close()
    assert prepared == ["once"]
