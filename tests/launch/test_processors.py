"""A rank's process on its share of the machine."""

from __future__ import annotations

import os

import pytest
import torch

from tightfit.launch.processors import said_by_user, settle


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
