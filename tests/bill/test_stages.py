"""Stages of a pipeline weigh as alike as whole layers allow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.bill.stages import least_full, split_evenly, stage_layers
from tightfit.errors import UnsupportedError


@pytest.mark.parametrize(
    ("layers", "embedding", "head", "sizes"),
    [
        ([1] * 8, 0, 0, [2, 2, 2, 2]),
        ([1] * 6, 1, 1, [1, 2, 2, 1]),
        ([1] * 7, 0, 0, [1, 2, 2, 2]),  # fewer where more micro-batches are
        ([1] * 6, 5, 0, [1, 1, 2, 2]),  # nothing makes the first one light, the others are even
        ([4, 1, 1, 1, 1], 0, 0, [1, 1, 1, 2]),
        ([3] * 4, 9, 9, [1, 1, 1, 1]),
    ],
)
def test_known_ways(layers: list[int], embedding: int, head: int, sizes: list[int]) -> None:
    found = stage_layers(layers, embedding, head, 4)
    assert [len(one) for one in found] == sizes
    assert [number for one in found for number in one] == list(range(len(layers)))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 4),
)
def test_no_other_way_has_a_lighter_heaviest_stage(
    layers: list[int], embedding: int, head: int, stages: int
) -> None:
    if stages > len(layers):
        with pytest.raises(UnsupportedError, match=f"more than the model's {len(layers)} layers"):
            stage_layers(layers, embedding, head, stages)
        return

    def heaviest(ends: tuple[int, ...]) -> int:
        weights = [sum(layers[a:b]) for a, b in zip((0, *ends), (*ends, None), strict=True)]
        weights[0] += embedding
        weights[-1] += head
        return max(weights)

    found = stage_layers(layers, embedding, head, stages)
    every = combinations(range(1, len(layers)), stages - 1)
    assert heaviest(tuple(one.stop for one in found[:-1])) == min(map(heaviest, every))


def test_chunks_of_a_stage_are_runs_in_turn() -> None:
    found = stage_layers([1] * 8, 1, 1, stages=2, chunks=2)
    assert found == stage_layers([1] * 8, 1, 1, stages=4), "run r is stage r % 2's"
    with pytest.raises(UnsupportedError, match=r"2 x virtual_pipeline_stages 3 = 6 is more than"):
        stage_layers([1] * 5, 1, 1, stages=2, chunks=3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(-2, 2))
def test_layers_that_are_given_are_taken_if_they_are_all(given: list[int], more: int) -> None:
    layers = max(1, sum(given) + more)
    if layers != sum(given):
        added = " + ".join(map(str, given))
        said = f"pipeline_layers {added} = {sum(given)}, and the model has {layers} layers"
        with pytest.raises(UnsupportedError, match=f"^{re.escape(said)}$"):
            stage_layers([1] * layers, 0, 0, len(given), given=given)
        return
    found = stage_layers([1] * layers, 0, 0, len(given), given=given)
    assert [len(run) for run in found] == given
    assert [number for run in found for number in run] == list(range(layers))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, 2),
    st.integers(0, 6),
)
def test_no_other_numbers_of_layers_make_the_fullest_less_full(
    costs: list[tuple[int, int]], chunks: int, more: int
) -> None:
    """Each stage has what its end costs, and what a layer costs there."""
    stages = len(costs)
    layers = stages * chunks + more

    def full(stage: int, own: int) -> int:
        return costs[stage][0] + costs[stage][1] * own

    def fullest(numbers: Iterable[int]) -> int:
        return max(full(stage, own) for stage, own in enumerate(numbers))

    found = least_full(layers, stages, full, chunks)
    every = product(range(chunks, chunks + more + 1), repeat=stages)
    assert min(found) >= chunks
    assert fullest(found) == min(fullest(one) for one in every if sum(one) == sum(found) == layers)


@given(st.lists(st.integers(3, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_runs_of_a_stage_are_as_even_as_they_can_be(layers: list[int], chunks: int) -> None:
    runs = split_evenly(layers, chunks)
    for stage, own in enumerate(layers):
        its = runs[stage :: len(layers)]
        assert sum(its) == own
        assert sorted(its) == list(its)
        assert its[-1] - its[0] <= 1
