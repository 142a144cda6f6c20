"""The link between real ranks on gloo."""

from __future__ import annotations

import pytest

from tightfit.errors import RankError
from tightfit.launch.link import measure_link


def test_two_ranks_measure_their_link() -> None:
    found = measure_link(2, "cpu", quick=True)
    assert (found.ranks, found.backend) == (2, "gloo")
    assert set(found.lines) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert len({sample.whole_bytes for sample in found.samples}) == 3
    assert all(line.bytes_per_second > 0 for line in found.lines.values())
    assert found.together is not None
    assert found.together.threads == 1
    assert found.together.matmul


def test_a_rank_that_fails_is_named() -> None:
    """There is no card here, so the first thing that a rank does with one fails."""
    with pytest.raises(RankError, match="rank"):
        measure_link(2, "cuda", quick=True)


def test_ranks_that_take_too_long_are_given_up() -> None:
    with pytest.raises(RankError, match="not done after"):
        measure_link(2, "cpu", quick=True, limit_seconds=0.1)
