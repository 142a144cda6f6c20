"""Copies that arrive as late as they may, and poison until then: a missing wait is a wrong number.

The same at every run, since nothing here depends on time.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from tightfit.engine.transfer import Arrival, Transfer

POISON_BYTE = 0xA5


class PostponedTransfer(Transfer):
    """Copies when an arrival, or a later one, is waited for or ordered: first in, first out.

    Until then the destination holds NaN (0xA5 in the bytes of other types). Whoever reads it
    computes with that, and whoever writes the source too early copies the wrong numbers. A copy
    that itself reads or writes what has not arrived is refused.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._lock = threading.RLock()
        self._pending: deque[_Pending] = deque()
        self.most_pending = 0

    @torch.no_grad()
    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, ordered: bool = True
    ) -> Arrival:
        with self._lock:
            for earlier in self._pending:
                earlier.refuse_if_touched(destination, source)
            poison(destination)
            pending = _Pending(self, destination, source)
            self._pending.append(pending)
            self.most_pending = max(self.most_pending, len(self._pending))
        return pending

    def wait(self) -> None:
        with self._lock:
            while self._pending:
                self._pending.popleft().arrive()

    def until(self, arrival: _Pending) -> None:
        """Let everything up to `arrival` arrive."""
        with self._lock:
            while not arrival.is_there:
                self._pending.popleft().arrive()

    @property
    def pending(self) -> int:
        """Copies that have not arrived."""
        return len(self._pending)


class _Pending:
    """A copy that has been promised."""

    def __init__(
        self, transfer: PostponedTransfer, destination: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._transfer = transfer
        self._destination = destination
        self._source = source
        self.is_there = False

    def refuse_if_touched(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert not _overlap(source, self._destination), "copies what has not arrived"
        assert not _overlap(destination, self._source), "overwrites what is being copied"
        assert not _overlap(destination, self._destination), "two copies to one place at once"

    @torch.no_grad()
    def arrive(self) -> None:
        self._destination.data.copy_(self._source)  # as on a card, autograd knows nothing of it
        self.is_there = True

    def wait(self) -> None:
        self._transfer.until(self)

    def order(self) -> None:
        self._transfer.until(self)


def poison(tensor: torch.Tensor) -> None:
    """Make a tensor's values unusable."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool or not tensor.is_contiguous():
        tensor.fill_(1)
    else:
        tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _span(first), _span(second)
    return max(begin, other_begin) < min(end, other_end)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that a tensor's values take."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
