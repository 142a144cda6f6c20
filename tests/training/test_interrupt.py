"""The first signal asks to stop, the second stops."""

from __future__ import annotations

import signal
import threading

import pytest

from tightfit.training.interrupt import InterruptFlag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_sets_the_flag_and_a_second_acts_as_before(number: signal.Signals) -> None:
    caught: list[int] = []
    before = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        with InterruptFlag() as flag:
            assert not flag.raised
            signal.raise_signal(number)
            assert flag.raised
            assert caught == []
            signal.raise_signal(number)
            assert caught == [number]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with InterruptFlag():
        assert signal.getsignal(signal.SIGINT) != before[0]
    with pytest.raises(KeyboardInterrupt), InterruptFlag():
        raise KeyboardInterrupt
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_it_works_in_a_thread_without_catching_anything() -> None:
    raised: list[bool] = []

    def work() -> None:
        with InterruptFlag() as flag:
            raised.append(flag.raised)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert raised == [False]
