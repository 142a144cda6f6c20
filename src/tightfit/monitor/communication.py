"""How long a rank waits for others in a step: time in collectives that no computing hides.

On a CPU it is the time that the thread of the step is inside a collective or waits for one. On a
card it is the time that the compute stream stands still for one, from events before and after each
wait, which are read when they are over, without a synchronisation: what is not over when a step is
read counts with the next. A rank that comes first to a collective waits for the last one, and that
counts too: a slow rank looks like a slow link on all the others.

torch has no hook around waits, so while a step is counted the methods through which everything in
Python sends and waits are replaced: those of `ProcessGroup` and `Work`, and on a card those by
which streams wait for each other (FSDP2's collectives have streams of their own). Not seen are
functional collectives, which C++ starts by itself (DTensor's own redistribution; nothing in the
engine's step uses it), streams that wait in C++, and what the host waits for when it reads a number
from a card. With one rank nothing is replaced and nothing counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

_SENDING = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)  # of ProcessGroup, as far as this torch has them


class Clock(Protocol):
    """Marks moments of what computes the step: a thread of the host, or a stream of a card."""

    def is_computing(self) -> bool:
        """Whether the caller is at work there, so that its waits delay the step."""
        ...

    def mark(self) -> Any:
        """This moment."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks; None where the second has not come yet."""
        ...

    def replacements(self, timed: Callable[..., Any]) -> list[tuple[type, str, Any]]:
        """What else waits there: class, name of a method, and what to put in its place.

        Args:
            timed: makes of a method one whose time counts.
        """
        ...


class HostClock:
    """The thread that makes it; see `Clock`."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def is_computing(self) -> bool:
        """See `Clock.is_computing`."""
        return threading.get_ident() == self._thread

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """See `Clock.seconds`."""
        return end - begin

    def replacements(self, timed: Callable[..., Any]) -> list[tuple[type, str, Any]]:
        """None: whatever waits, waits in a `Work`."""
        return []


class CardClock:
    """The stream that is current where it is made; see `Clock`.

    Backward runs on a thread of its own, but on the same stream, so threads do not matter.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._others: set[Any] = set()  # streams on which something was sent
        self._sent: WeakSet[Any] = WeakSet()  # events on those

    def is_computing(self) -> bool:
        """See `Clock.is_computing`; another stream that is current where something is sent is one
        of communication from then on."""
        current = torch.cuda.current_stream()
        if current == self._stream:
            return True
        self._others.add(current)
        return False

    def mark(self) -> torch.cuda.Event:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """See `Clock.seconds`."""
        return begin.elapsed_time(end) / 1000 if end.query() else None

    def replacements(self, timed: Callable[..., Any]) -> list[tuple[type, str, Any]]:
        """Waits of the compute stream for an event of a stream of communication. A stream that
        waits for a stream does it through these too."""
        record, wait = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event
        timed_wait = timed(wait)

        def record_event(stream: Any, event: Any = None) -> Any:
            recorded = record(stream, event)
            if stream in self._others:
                self._sent.add(recorded)
            return recorded

        def wait_event(stream: Any, event: Any) -> None:
            for_others = stream == self._stream and event in self._sent
            (timed_wait if for_others else wait)(stream, event)

        return [
            (torch.cuda.Stream, "record_event", record_event),
            (torch.cuda.Stream, "wait_event", wait_event),
        ]


class CommunicationWatch:
    """Counts the seconds that this rank waits for others.

    Args:
        device: where the step computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_card = device.type == "cuda"
        self._clock: Clock | None = None
        self._waits: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Waits inside count, in all that this thread starts. Not to be nested."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield
            return
        clock = self._clock = self._clock or (CardClock() if self._on_card else HostClock())
        replaced: list[tuple[type, str, Any]] = [
            (dist.ProcessGroup, name, self._timed(clock, getattr(dist.ProcessGroup, name)))
            for name in _SENDING
            if name in vars(dist.ProcessGroup)
        ]
        replaced.append((dist.Work, "wait", self._timed(clock, dist.Work.wait)))
        replaced += clock.replacements(lambda method: self._timed(clock, method))
        with ExitStack() as after:
            for owner, name, replacement in replaced:
                after.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, replacement)
            yield

    def take_seconds(self) -> float:
        """The seconds of the waits that are over, each told once."""
        total = 0.0
        while self._waits and self._clock is not None:
            seconds = self._clock.seconds(*self._waits[0])
            if seconds is None:
                break
            total += seconds
            self._waits.popleft()
        return total

    def _timed(self, clock: Clock, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **named: Any) -> Any:
            if not clock.is_computing():
                return method(*inputs, **named)
            begin = clock.mark()
            try:
                return method(*inputs, **named)
            finally:
                self._waits.append((begin, clock.mark()))

        return call
