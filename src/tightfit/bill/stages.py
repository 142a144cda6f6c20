"""Which layers each stage of a pipeline has.

As many as somebody says, or as many that stages weigh alike. A stage weighs as many parameters as
it has: they set its memory, and nearly all of them are multiplied once per token. The embedding
counts for the first stage, last norm and output layer for the last, which has a copy where the two
are tied. Interleaved stages have several runs of layers (chunks) each, which weigh alike. Knows
counts only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import TypeVar

from tightfit.errors import UnsupportedError


def stage_layers(
    layers: Sequence[int],
    embedding: int,
    head: int,
    stages: int,
    chunks: int = 1,
    given: Sequence[int] = (),
) -> list[range]:
    """The numbers of the layers of each run, at least one each, in the order of the model: run
    number r is stage r % stages's; with one chunk each stage has one.

    Where nothing is given the heaviest run is as light as it can be, and then all are as even as
    they can be (least sum of squares); of equal ways the one with fewer layers in early runs, which
    have more micro-batches at a time.

    Args:
        layers: parameters of each.
        embedding: parameters that the first stage has beside its layers.
        head: those that the last one has.
        chunks: runs of each stage, which are what is made even.
        given: how many layers each run has.

    Raises:
        UnsupportedError: there are fewer layers than runs, or another number than what is given
            adds up to.
    """
    if given:
        check_adds_up(given, len(layers))
        return _runs(tuple(accumulate(given)))
    runs = stages * chunks
    if runs > len(layers):
        times = f" x virtual_pipeline_stages {chunks} = {runs}" if chunks > 1 else ""
        raise UnsupportedError(
            f"pipeline_parallel_size {stages}{times} is more than the model's {len(layers)} layers"
        )
    before = [sum(layers[:number]) for number in range(len(layers) + 1)]

    def weight(stage: int, first: int, end: int) -> int:
        ends = embedding * (stage == 0) + head * (stage == runs - 1)
        return before[end] - before[first] + ends

    heaviest, _ = _best(weight, len(layers), runs, max)

    def uneven(so_far: float, its_own: int) -> float:
        return so_far + its_own**2 if its_own <= heaviest else math.inf

    _, ends = _best(weight, len(layers), runs, uneven)
    return _runs(ends)


def check_adds_up(given: Sequence[int], layers: int) -> None:
    """See that runs of so many layers are all of a model's.

    Raises:
        UnsupportedError: they are more or fewer.
    """
    if sum(given) != layers:
        added = " + ".join(map(str, given))
        raise UnsupportedError(
            f"pipeline_layers {added} = {sum(given)}, and the model has {layers} layers"
        )


def split_evenly(layers: Sequence[int], chunks: int) -> tuple[int, ...]:
    """The layers of each run, in the order of the model, where each stage has so many in all: its
    later runs have those that are left over, as fewer micro-batches are in them at a time.

    Args:
        layers: of each stage, `chunks` or more.
    """
    return tuple(
        own // chunks + (chunk >= chunks - own % chunks)
        for chunk in range(chunks)
        for own in layers
    )


Key = TypeVar("Key", int, tuple[int, int])


def least_full(
    layers: int, stages: int, full: Callable[[int, int], Key], chunks: int = 1
) -> list[int]:
    """How many layers each stage has where the fullest is least full; `chunks` at least.

    Each layer goes to the stage that is least full with it, which is best as nobody gets emptier
    by a layer; of equal ones to the later one, which has fewer micro-batches at a time.

    Args:
        full: how full a stage of this number is with so many layers.
    """
    found = [chunks] * stages
    waiting = [(full(stage, chunks + 1), -stage) for stage in range(stages)]
    heapify(waiting)
    for _ in range(layers - chunks * stages):
        _, stage = waiting[0]
        found[-stage] += 1
        heapreplace(waiting, (full(-stage, found[-stage] + 1), stage))
    return found


def _runs(ends: tuple[int, ...]) -> list[range]:
    return [range(first, end) for first, end in pairwise((0, *ends))]


@lru_cache
def layout_of(
    layers: int, inside: int, end: int, stages: int, chunks: int = 1, given: tuple[int, ...] = ()
) -> tuple[range, ...]:
    """`stage_layers` of layers that are all alike.

    Args:
        inside: parameters of a layer.
        end: those of the embedding, and of the output layer.
    """
    return tuple(stage_layers([inside] * layers, end, end, stages, chunks, given))


def _best(
    weight: Callable[[int, int, int], int],
    layers: int,
    stages: int,
    joined: Callable[[float, int], float],
) -> tuple[float, tuple[int, ...]]:
    """The least value of all ways to cut, and where its stages end."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        left = stages - stage - 1
        best = {
            end: min(
                (joined(value, weight(stage, first, end)), (*ends, end))
                for first, (value, ends) in best.items()
                if first < end
            )
            for end in range(stage + 1, layers - left + 1)
        }
    return best[layers]
