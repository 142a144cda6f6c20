"""What the card's allocator reserves for a run with another engine, beyond what is allocated.

Replays two steps: the first makes the optimizer's states between the activations' blocks, the
second finds them there. Gathered parameters lie in blocks of their own throughout, as they do on
a card, where they belong to another stream. Knows what a ledger saw, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from tightfit.bill.other_states import EngineStates, Moment
from tightfit.bill.table import Kind
from tightfit.dry_run.allocator import CachingAllocator

_GATHER_BLOCKS = 4


class Part(StrEnum):
    """Parts of a micro-batch; FORWARD and BACKWARD have one per layer."""

    START = "start"
    FORWARD = "forward"
    HEAD = "head"
    BACKWARD = "backward"
    END = "end"


class Segment(NamedTuple):
    """What happens between two layers; `layer` is 0 where there is no layer."""

    micro_batch: int
    part: Part
    layer: int = 0


Key = tuple[Segment, int]  # where a storage began, and the how manieth it was there
Event = tuple[Key, int, bool]  # a storage, its bytes from then on, whether it holds a gradient


@dataclass
class Trace:
    """Storages of the micro-batches of a step as they come, change and go.

    Attributes:
        depth: layers of the model that was traced.
        parameters: numbers of elements of the parameters.
        trained: of those that get gradients.
        events: by segment, in order; a storage of 0 bytes has ended.
    """

    depth: int
    parameters: Sequence[int] = ()
    trained: Sequence[int] = ()
    events: dict[Segment, list[Event]] = field(default_factory=dict)

    def deeper(self, depth: int) -> Iterator[Event]:
        """The events of a model of `depth` layers, whose middle ones do what the middle one did."""
        for micro_batch in sorted({segment.micro_batch for segment in self.events}):
            for part, layers in _order(depth):
                for layer in layers:
                    yield from self._segment(Segment(micro_batch, part, layer), depth)

    def _segment(self, segment: Segment, depth: int) -> Iterator[Event]:
        middle, added = self.depth // 2, depth - self.depth
        if segment.part in (Part.FORWARD, Part.BACKWARD):
            shift = min(max(segment.layer - middle, 0), added)
        else:
            shift = None
        source = segment._replace(layer=segment.layer - (shift or 0))
        for (start, number), size, gradient in self.events.get(source, ()):
            moved = start
            if start.part in (Part.FORWARD, Part.BACKWARD):
                by = shift if shift is not None else (added if start.layer > middle else 0)
                moved = start._replace(layer=start.layer + by)
            yield (moved, number), size, gradient


def _order(depth: int) -> tuple[tuple[Part, Sequence[int]], ...]:
    upwards = range(depth)
    return (
        (Part.START, (0,)),
        (Part.FORWARD, upwards),
        (Part.HEAD, (0,)),
        (Part.BACKWARD, upwards[::-1]),
        (Part.END, (0,)),
    )


def fragmentation_bytes(
    trace: Trace,
    states: EngineStates,
    depth: int,
    *,
    expandable_segments: bool = False,
    gradients_apart: bool = False,
    lengths: Sequence[float] = (1.0, 1.0),
) -> int:
    """Reserved at the peak of some steps at `depth` layers, less what is allocated at the peak.

    Args:
        expandable_segments: as `PYTORCH_CUDA_ALLOC_CONF` says.
        gradients_apart: FSDP receives shards of gradients on a stream of its own, whose pool lends
            nothing to others.
        lengths: of the samples of one step after the other, as shares of the longest.
    """
    replay = _Replay(trace, states, depth, expandable_segments, gradients_apart)
    replay.load()
    for length in lengths:
        replay.micro_batches(length)
        replay.update()
    return max(0, replay.max_reserved_bytes - replay.max_allocated_bytes)


class _Replay:
    def __init__(
        self,
        trace: Trace,
        states: EngineStates,
        depth: int,
        expandable_segments: bool,
        gradients_apart: bool,
    ) -> None:
        self._events = list(trace.deeper(depth))
        self.allocator = CachingAllocator(expandable_segments=expandable_segments)
        self._apart = CachingAllocator(expandable_segments=expandable_segments)
        self._gradients_apart = gradients_apart
        self.max_allocated_bytes = 0
        self._trace = trace
        self._resident: Mapping[Kind, float] = states.resident
        self._during = states.during
        self._keys = count()
        self._alive: dict[Key, int] = {}
        self._has_states = False

    def load(self) -> None:
        """Parameters, buckets and gathered parameters, which stay."""
        self._hold(self._trace.parameters, self._resident.get(Kind.PARAMETERS, 0))
        for kind in (Kind.COLLECTIVES, Kind.GRADIENTS):
            self._hold((1,), self._resident.get(kind, 0))
        gathered = self._during[Moment.FORWARD].get(Kind.COLLECTIVES, 0)
        self._hold((1,) * _GATHER_BLOCKS, gathered)

    @property
    def max_reserved_bytes(self) -> int:
        """Of both pools."""
        return self.allocator.max_reserved_bytes + self._apart.max_reserved_bytes

    def micro_batches(self, length: float) -> None:
        """Forward and backward of samples of a share of the longest's length."""
        for key, whole, gradient in self._events:
            size = whole if gradient or length == 1 else round(whole * length)
            if size or key in self._alive:
                self._resize(key, size, apart=gradient and self._gradients_apart)

    def _resize(self, key: Key, size: int, *, apart: bool) -> None:
        number = self._alive.pop(key, None)
        number = next(self._keys) if number is None else number
        self.allocator.resize(number, 0 if apart else size)
        if apart:
            self._apart.resize(number, size)
        if size:
            self._alive[key] = number
            self._note_peak()

    def _note_peak(self) -> None:
        now = self.allocator.allocated_bytes + self._apart.allocated_bytes
        self.max_allocated_bytes = max(self.max_allocated_bytes, now)

    def update(self) -> None:
        """The optimizer's step, and the end of the gradients."""
        if not self._has_states:
            for kind in (Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES):
                self._hold(self._trace.trained, self._resident.get(kind, 0))
            self._has_states = True
        temporary = self._during[Moment.STEP].get(Kind.TEMPORARIES, 0)
        for key in self._hold(self._trace.trained, temporary):
            self.allocator.resize(key, 0)
        for number in self._alive.values():
            self.allocator.resize(number, 0)
            self._apart.resize(number, 0)
        self._alive.clear()

    def _hold(self, shares: Sequence[int], total: float) -> list[int]:
        """Blocks of `total` bytes in proportion to `shares`; their keys."""
        whole = sum(shares)
        sizes = [round(total * share / whole) for share in shares] if whole and total else []
        keys = [next(self._keys) for size in sizes if size]
        for key, size in zip(keys, filter(None, sizes), strict=True):
            self.allocator.resize(key, size)
        self._note_peak()
        return keys
