"""When a run's ledger counts."""

from __future__ import annotations

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
