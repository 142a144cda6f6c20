"""What others take of the processors."""

from __future__ import annotations

import pytest

from tightfit.planner.probe.busy import OthersBusy


@pytest.mark.parametrize(("taken", "cores"), [(30.0, 1.5), (0.0, 0.0), (-3.0, 0.0)])
def test_average_of_what_others_take(taken: float, cores: float) -> None:
    seconds, now = iter([100.0, 100.0 + taken]), iter([7.0, 27.0])
    busy = OthersBusy(lambda: next(seconds), lambda: next(now))
    with busy.watching():
        pass
    assert busy.cores == cores


def test_this_machine() -> None:
    busy = OthersBusy()
    with busy.watching():
        sum(range(1000))
    assert busy.cores >= 0
