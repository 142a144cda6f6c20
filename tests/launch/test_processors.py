"""A rank's process on its share of the machine."""

from __future__ import annotations

import os

import pytest
import torch

from tightfit.launch import processors
from tightfit.launch.environment import RankPlace
from tightfit.launch.processors import said_by_user, settle, threads_variable


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, False),  # torchrun's own
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "none"}, True),
    ],
)
def test_who_has_said_it(environment: dict[str, str], said: bool) -> None:
    assert said_by_user(environment) == said


def test_each_rank_is_told_of_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks cannot have the same share of seven cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(7)))
    monkeypatch.setattr(
        processors, "threads_of", lambda rank, ranks, allowed, quota: (len(allowed) + rank) // ranks
    )
    places = [RankPlace(rank, 3, rank, 3, "localhost", 1) for rank in range(3)]
    assert [threads_variable(place)["OMP_NUM_THREADS"] for place in places] == ["2", "2", "3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_variable(places[2]) == {"OMP_NUM_THREADS": "5"}


def test_settling_gives_torch_its_threads() -> None:
    before, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        settle(0, 1, {"OMP_NUM_THREADS": "1"})
        assert torch.get_num_threads() == before
        settle(0, len(allowed), {})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
        os.sched_setaffinity(0, allowed)
