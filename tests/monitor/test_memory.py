"""When a run's ledger counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.monitor.memory import MemoryWatch
from tightfit.policies import Tier

CPU = torch.device("cpu")


def test_it_counts_two_steps_and_what_comes_for_the_first_time() -> None:
    with MemoryWatch(CPU, None) as watch:
        kept = torch.ones(1000)
        watch.step_done(1)
        assert ledger.active() is watch.ledger
        watch.step_done(2)
        assert ledger.active() is None
        assert watch.device_bytes() is None
        unseen = torch.ones(10_000)
        with watch.counting(), ledger.phase(Phase.SAVE):
            assert watch.device_bytes() == 4000, "what it knew is still there"
            torch.ones(500)
        assert ledger.active() is None
        with watch.counting(unless=True):
            assert ledger.active() is None
        del kept
        with watch.counting():
            assert watch.device_bytes() == 0, "what ended meanwhile is gone"
        del unseen
    assert watch.table().phase_peak_bytes(Phase.SAVE, Tier.DEVICE) == 6000
    assert watch.device_peak_bytes() == 6000


def test_a_limit_is_enforced_to_the_end() -> None:
    with MemoryWatch(CPU, 5000) as watch:
        watch.step_done(100)
        with watch.counting():
            pass
        assert ledger.active() is watch.ledger
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2000)
    assert ledger.active() is None


def test_it_is_off_after_an_error() -> None:
    with pytest.raises(KeyError), MemoryWatch(CPU, None):
        raise KeyError
    assert ledger.active() is None


@pytest.mark.parametrize(
    ("enforced", "fractions"), [(None, []), (250, [0.25]), (5000, [1.0])], ids=str
)
def test_a_card_is_limited_and_its_peak_is_that_of_the_run(
    monkeypatch: pytest.MonkeyPatch, enforced: int | None, fractions: list[float]
) -> None:
    """Measuring rates before the run takes memory too, which is not the run's."""
    card = torch.device("cuda", 0)
    peak = [999]
    set_to: list[float] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000)
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: set_to.append(fraction),
    )
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 10)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    watch = MemoryWatch(card, enforced)
    assert set_to == fractions
    assert watch.device_peak_bytes() == 10
