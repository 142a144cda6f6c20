"""The engine's copies between device and host, in one place that is asynchronous where it can be.

On CUDA each direction has a stream of its own and arrivals are events. On the CPU a copy is done at
once, between storages that the ledger counts on different tiers. Knows nothing of what is copied.

Whoever copies holds to one rule: until a copy has arrived nobody reads its destination, writes its
source, or takes the memory of either away. An `Arrival` is how to wait for that.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch

from tightfit.policies import Tier


class Arrival(Protocol):
    """Something that is on its way: a copy, or a piece of a file."""

    def wait(self) -> None:
        """Return when it is there; raises what went wrong on the way, if anything did."""
        ...

    def order(self) -> None:
        """Let what the device's current stream is given from now on find it there.

        Where there are no streams this is `wait`.
        """
        ...


class _There:
    """See `THERE`."""

    def wait(self) -> None:
        """It is there."""

    def order(self) -> None:
        """It is there."""


THERE: Arrival = _There()  # what has arrived already


def host_tier_of(device: torch.device) -> Tier:
    """Where what travels to and from `device` lives on the host: page-locked if it is a card."""
    return Tier.PINNED if device.type == "cuda" else Tier.HOST


class Transfer:
    """Copies for one device; any thread may call it.

    Args:
        device: the accelerator, or the CPU standing in for one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        has_streams = device.type == "cuda"
        self._to_host = _Road(device) if has_streams else None
        self._to_device = _Road(device) if has_streams else None

    @property
    def host_tier(self) -> Tier:
        """The tier of host memory that copies come from and go to."""
        return host_tier_of(self.device)

    @torch.no_grad()
    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, ordered: bool = True
    ) -> Arrival:
        """Begin a copy of `source` to `destination`, which has as many values of the same type.

        A destination on the host is contiguous, and slab memory if the copy is to be asynchronous.

        Args:
            ordered: begin after what the current stream has been given so far. Without, at once:
                for a source and a destination that no stream has unfinished work with, which
                freshly allocated device memory is not.
        """
        road = self._to_host if destination.device.type == "cpu" else self._to_device
        if road is None or destination.device == source.device == torch.device("cpu"):
            destination.copy_(source)
            return THERE
        return road.copy(destination, source, ordered)

    def wait(self) -> None:
        """Return when every copy so far has arrived."""
        for road in (self._to_host, self._to_device):
            if road is not None:
                road.wait()


class _Road:
    """Copies of a card in one direction, in the order in which they were begun.

    Device memory is safe without `record_stream`: what is held here until the copy was waited for,
    or ordered on the stream that the memory was allocated for, cannot be given to anybody else
    before. `record_stream` would keep memory from reuse until the host sees that the copy is done,
    and a host that runs ahead of the card would then allocate every layer anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._under_way: deque[_UnderWay] = deque()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, ordered: bool) -> Arrival:
        """See `Transfer.copy`."""
        assert destination.is_cuda or destination.is_contiguous(), "torch would not wait for it"
        current = torch.cuda.current_stream(self._device)
        with self._lock:
            if ordered:
                self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                destination.copy_(source, non_blocking=True)
                event = torch.cuda.Event(blocking=True)  # a waiting host leaves its core to others
                event.record(self._stream)
            arrival = _UnderWay(event, current, (destination, source))
            while self._under_way and self._under_way[0].is_done():
                self._under_way.popleft()
            self._under_way.append(arrival)
        return arrival

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self._stream.synchronize()  # also for what was ordered, and is not held here any more
        with self._lock:
            arrivals = list(self._under_way)
            self._under_way.clear()
        for arrival in arrivals:
            arrival.wait()


class _UnderWay:
    """A copy that a stream has been given, and what it copies."""

    def __init__(
        self,
        event: torch.cuda.Event,
        allocating: torch.cuda.Stream,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        self._event = event
        self._allocating = allocating
        self._tensors = tensors

    def is_done(self) -> bool:
        """Whether nobody needs to hold its tensors any more."""
        return not self._tensors or self._event.query()

    def wait(self) -> None:
        """See `Arrival.wait`."""
        self._event.synchronize()
        self._tensors = ()

    def order(self) -> None:
        """See `Arrival.order`."""
        current = torch.cuda.current_stream(self._allocating.device)
        current.wait_event(self._event)
        if current == self._allocating:  # its next use of that memory comes after the copy
            self._tensors = ()
