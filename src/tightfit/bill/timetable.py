"""Who computes what when in a pipeline, and which results then travel.

In a tick a stage takes one micro-batch forward or backward through one of its chunks, or waits. At
its end results go to the stage that has the next chunk, which all stages know, as they all make the
same table. So the two ends of every message are in the same tick, and nobody can wait for somebody
who waits for him, whatever carries the messages.

- 1F1B (https://arxiv.org/abs/1806.03377): stage s of p begins with p - s - 1 forwards, then does a
  backward after each forward, so that it has the activations of at most p - s micro-batches.
- GPipe (https://arxiv.org/abs/1811.06965) does all forwards first.
- Interleaved (https://arxiv.org/abs/2104.04473, 2.2): a stage has v chunks, and chunk c of stage s
  is the (c p + s)th run of layers. Micro-batches go in groups, a group through one chunk after
  the other. It is 1F1B after 2 (p - s - 1) + (v - 1) g forwards, g being the size of a group. With
  m micro-batches a stage waits in 2 (p - 1) of 2 (m v + p - 1) ticks, each a vth as long as
  without chunks. The paper has groups of p and wants p to divide m. Here they are as even as they
  can be and not smaller than p, so that any m of p or more waits no longer than that; fewer are one
  group, and wait longer.

Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from tightfit.policies import PipelineSchedule


class Work(NamedTuple):
    """One micro-batch through one of a stage's chunks."""

    is_forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Tick:
    """A stage's part of a tick.

    Attributes:
        work: what it does; None: it waits.
        sends_to: the stage that its result goes to afterwards; None: nobody waits for it.
        receives: what comes to it afterwards: the work that it is for, and the stage it is from.
    """

    work: Work | None
    sends_to: int | None
    receives: tuple[tuple[Work, int], ...]


@lru_cache(maxsize=64)
def timetable(
    schedule: PipelineSchedule, stage: int, stages: int, chunks: int, micro_batches: int
) -> tuple[Tick, ...]:
    """A stage's ticks of one step.

    Args:
        stage: its number, counted from 0, of `stages`, which are two or more.
        chunks: of each stage; 1 unless interleaved.
    """
    return tuple(_Pipeline(schedule, stages, chunks, micro_batches).ticks(stage))


def most_in_flight(
    schedule: PipelineSchedule, stage: int, stages: int, chunks: int, micro_batches: int
) -> int:
    """Of how many forwards through one of its chunks a stage has the activations at a time."""
    pipeline = _Pipeline(schedule, stages, chunks, micro_batches)
    return min(pipeline.ahead(stage) + 1, chunks * micro_batches)


def enough_micro_batches(schedule: PipelineSchedule, stages: int, micro_batches: int) -> int:
    """So few, or fewer, take what `micro_batches` take on every stage: all that there is at a time
    has once been there, in groups of the same sizes. GPipe has all of them at a time."""
    match schedule:
        case PipelineSchedule.GPIPE:
            return micro_batches
        case PipelineSchedule.ONE_FORWARD_ONE_BACKWARD:
            return min(micro_batches, stages + 1)
        case PipelineSchedule.INTERLEAVED:
            larger = len(_groups(stages, micro_batches)[0]) - stages
            return min(micro_batches, 3 * stages + max(0, 3 * larger - 2))  # three such groups


@dataclass(frozen=True)
class _Pipeline:
    """All stages."""

    schedule: PipelineSchedule
    stages: int
    chunks: int
    micro_batches: int

    def ticks(self, stage: int) -> Iterator[Tick]:
        """Let all work through their orders, each as soon as what it needs is there."""
        orders = [iter(self._order(number)) for number in range(self.stages)]
        coming = [next(order, None) for order in orders]
        arrived: list[set[Work]] = [set() for _ in orders]
        while any(coming):
            done = {
                number: work
                for number, work in enumerate(coming)
                if work and (work in arrived[number] or self._needs_nothing(number, work))
            }
            assert done, "an order in which all wait"
            received = []
            for number, work in done.items():
                arrived[number].discard(work)
                coming[number] = next(orders[number], None)
                to, following = self._after(number, work)
                if following is not None:
                    arrived[to].add(following)
                    if to == stage:
                        received.append((following, number))
            own = done.get(stage)
            to, following = self._after(stage, own) if own else (stage, None)
            yield Tick(own, to if following else None, tuple(received))

    def _order(self, stage: int) -> list[Work]:
        """In which a stage does its work."""
        groups = _groups(self.stages, self.micro_batches)
        forwards = [
            Work(True, chunk, index)
            for group in groups
            for chunk in range(self.chunks)
            for index in group
        ]
        backwards = [
            Work(False, chunk, index)
            for group in groups
            for chunk in reversed(range(self.chunks))
            for index in group
        ]
        ahead = min(self.ahead(stage), len(forwards))
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        return order + backwards[len(forwards) - ahead :]

    def ahead(self, stage: int) -> int:
        """Forwards of a stage before its first backward follows one, if there are as many."""
        after = self.stages - stage - 1
        match self.schedule:
            case PipelineSchedule.GPIPE:
                return self.micro_batches
            case PipelineSchedule.ONE_FORWARD_ONE_BACKWARD:
                return after
            case PipelineSchedule.INTERLEAVED:
                group = len(_groups(self.stages, self.micro_batches)[0])
                return 2 * after + (self.chunks - 1) * group

    def _needs_nothing(self, stage: int, work: Work) -> bool:
        """Whether it begins with tokens, or with the loss."""
        number = work.chunk * self.stages + stage
        return number == (0 if work.is_forward else self.stages * self.chunks - 1)

    def _after(self, stage: int, work: Work) -> tuple[int, Work | None]:
        """Which stage's work its result is for; None where a micro-batch turns or is through."""
        step = 1 if work.is_forward else -1
        number = work.chunk * self.stages + stage + step
        if not 0 <= number < self.stages * self.chunks:
            return stage, None
        return number % self.stages, work._replace(chunk=number // self.stages)


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Micro-batches that go through one chunk after the other, the largest group first."""
    count = max(1, micro_batches // stages)
    ends = [-(-micro_batches * number // count) for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]
