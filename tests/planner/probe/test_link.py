"""The line through what collectives take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.planner.probe.figures import LinkSample
from tightfit.planner.probe.link import SIZES, fit_line, sent_share


@given(
    latency=st.floats(0, 1e-2),
    rate=st.floats(1e6, 1e12),
    ranks=st.integers(2, 16),
    name=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
)
def test_a_line_is_found_again(latency: float, rate: float, ranks: int, name: str) -> None:
    share = sent_share(name, ranks)  # type: ignore[arg-type]
    samples = [
        LinkSample(name, size, latency + size * share / rate)  # type: ignore[arg-type]
        for size in SIZES
    ]
    other = "all_reduce" if name != "all_reduce" else "all_gather"
    samples.append(LinkSample(other, 64, 1.0))
    found = fit_line(samples, name, ranks)  # type: ignore[arg-type]
    for sample in samples[:-1]:
        predicted = found.latency_seconds + sample.whole_bytes * share / found.bytes_per_second
        assert predicted == pytest.approx(sample.seconds, rel=1e-3)


def test_small_tensors_count_as_much_as_large_ones() -> None:
    """A large tensor that is 10% late must not hide what a small one takes."""
    seconds = {4096: 1e-4, 2**20: 1e-4 + 2**20 / 1e9, 2**26: 1.1 * 2**26 / 1e9}
    samples = [LinkSample("all_reduce", size, taken) for size, taken in seconds.items()]
    found = fit_line(samples, "all_reduce", 2)
    assert found.latency_seconds == pytest.approx(1e-4, rel=0.1)


def test_latency_is_never_below_zero() -> None:
    samples = [LinkSample("all_gather", size, (size / 1e9) ** 1.2) for size in SIZES]
    found = fit_line(samples, "all_gather", 2)
    assert found.latency_seconds == 0
    assert found.bytes_per_second > 0


def test_where_size_does_not_matter_all_is_latency() -> None:
    samples = [LinkSample("all_gather", size, 1e-3 - size * 1e-12) for size in SIZES]
    found = fit_line(samples, "all_gather", 2)
    assert found.latency_seconds == pytest.approx(1e-3, rel=0.1)
    assert found.bytes_per_second > 0


def test_what_a_ring_sends() -> None:
    assert [sent_share("all_gather", n) for n in (2, 4)] == [0.5, 0.75]
    assert sent_share("all_reduce", 4) == 1.5
