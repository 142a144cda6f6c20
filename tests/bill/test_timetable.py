"""Tables of pipelines of every size: complete, in order, without waits that never end."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tightfit.bill.timetable import Tick, Work, enough_micro_batches, timetable
from tightfit.policies import PipelineSchedule

ONE, GPIPE, INTERLEAVED = PipelineSchedule
PIPELINES = [
    (schedule, stages, chunks, count)
    for schedule, stages, chunks, count in product(
        PipelineSchedule, (2, 3, 4, 7), (1, 2, 3, 5), (1, 2, 3, 4, 5, 8, 9, 11, 12, 20)
    )
    if (chunks > 1) == (schedule is INTERLEAVED)
]


def tables(
    schedule: PipelineSchedule, stages: int, chunks: int, count: int
) -> list[tuple[Tick, ...]]:
    return [timetable(schedule, stage, stages, chunks, count) for stage in range(stages)]


def most_in_flight(ticks: tuple[Tick, ...]) -> int:
    now, most = 0, 0
    for tick in ticks:
        if tick.work:
            now += 1 if tick.work.is_forward else -1
            most = max(most, now)
    return most


@pytest.mark.parametrize(("schedule", "stages", "chunks", "count"), PIPELINES)
def test_every_micro_batch_goes_through_every_chunk_and_back(
    schedule: PipelineSchedule, stages: int, chunks: int, count: int
) -> None:
    for ticks in tables(schedule, stages, chunks, count):
        works = [tick.work for tick in ticks if tick.work]
        assert len(works) == len(set(works)) == 2 * chunks * count
        for chunk, is_forward in product(range(chunks), (True, False)):
            order = [w.micro_batch for w in works if w[:2] == (is_forward, chunk)]
            assert order == list(range(count)), "gradients come in the order of micro-batches"


@pytest.mark.parametrize(("schedule", "stages", "chunks", "count"), PIPELINES)
def test_messages_arrive_before_they_are_needed_and_nobody_waits_for_ever(
    schedule: PipelineSchedule, stages: int, chunks: int, count: int
) -> None:
    """Stages send and receive one after the other, each waiting until both are there."""
    places = [list(ticks) for ticks in tables(schedule, stages, chunks, count)]
    inbox: list[set[Work]] = [set() for _ in range(stages)]
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for stage, ticks in enumerate(places):
        for tick in ticks:
            work = tick.work
            if work:
                number = work.chunk * stages + stage
                ends = number == (0 if work.is_forward else stages * chunks - 1)
                assert ends or work in inbox[stage]
                inbox[stage].discard(work)
            if tick.sends_to is not None:
                sent[stage, tick.sends_to] += 1
            peers = [peer for _, peer in tick.receives]
            assert len(set(peers)) == len(peers), "one message of each other in a tick"
            received.update((peer, stage) for peer in peers)
            inbox[stage].update(arrived for arrived, _ in tick.receives)
    assert sent == received
    meet(places)


def meet(places: list[list[Tick]]) -> None:
    """Every stage is at one message after another; a pair that both wait for each other goes on."""
    events = [
        [{(stage, tick.sends_to)} - {(stage, None)} | {(p, stage) for _, p in tick.receives}
         for tick in ticks]
        for stage, ticks in enumerate(places)
    ]  # fmt: skip
    queues = [[event for event in own if event] for own in events]
    while any(queues):
        ready = [stage for stage, queue in enumerate(queues) if queue]
        closed = set(ready)
        while True:  # those whose peers all are at the very same messages
            keep = {
                stage
                for stage in closed
                if all(
                    other in closed and message in queues[other][0]
                    for message in queues[stage][0]
                    for other in message
                )
            }
            if keep == closed:
                break
            closed = keep
        assert closed, "all wait"
        for stage in closed:
            queues[stage].pop(0)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "count"),
    [pipeline for pipeline in PIPELINES if pipeline[2] == 1 or pipeline[3] >= pipeline[1]],
)
def test_the_bubble_is_the_papers(
    schedule: PipelineSchedule, stages: int, chunks: int, count: int
) -> None:
    """Also where the number of stages does not divide that of the micro-batches."""
    for ticks in tables(schedule, stages, chunks, count):
        assert sum(tick.work is None for tick in ticks) == 2 * (stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_what_is_in_flight(stages: int) -> None:
    count = 3 * stages
    for stage in range(stages):
        one = timetable(ONE, stage, stages, 1, count)
        assert most_in_flight(one) == stages - stage
        assert most_in_flight(timetable(GPIPE, stage, stages, 1, count)) == count
        chunked = timetable(INTERLEAVED, stage, stages, 2, count)
        assert most_in_flight(chunked) == 2 * (stages - stage - 1) + stages + 1


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 13, 23, 40])
def test_a_few_micro_batches_are_as_full_as_many(
    schedule: PipelineSchedule, stages: int, count: int
) -> None:
    chunks = 2 if schedule is INTERLEAVED else 1
    few = enough_micro_batches(schedule, stages, count)
    assert few <= count
    for stage in range(stages):
        fullest = [
            most_in_flight(timetable(schedule, stage, stages, chunks, number))
            for number in (few, count)
        ]
        assert fullest[0] == fullest[1]
