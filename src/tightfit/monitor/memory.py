"""The ledger of a run, and how long it stays on.

With an enforced limit (on a CPU) it counts throughout; else it counts load, the first optimizer
steps, the first evaluation and the first save, and is off in between, because it costs about 10%
of a CPU's time. On a card the allocator's own counters go on for nothing. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from tightfit.bill.table import MemoryTable
from tightfit.ledger import Ledger
from tightfit.policies import Tier

_STEPS_TO_COUNT = 2  # the first, and the first that begins as all later ones do


class MemoryWatch:
    """Counts a run's memory; a context manager around load and training.

    Args:
        device: where training runs.
        enforced_bytes: limit of the device tier; on a CPU the ledger enforces it, on a card the
            caching allocator does.
    """

    def __init__(self, device: torch.device, enforced_bytes: int | None) -> None:
        self._device = device
        self._enforced = enforced_bytes is not None and device.type == "cpu"
        limits = {Tier.DEVICE: enforced_bytes} if enforced_bytes and self._enforced else {}
        self.ledger = Ledger(device, limits)
        self._counting = False
        if device.type == "cuda":
            _prepare_card(device, enforced_bytes)

    def __enter__(self) -> Self:
        self.ledger.__enter__()
        self._counting = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._counting:
            self._counting = False
            self.ledger.__exit__(kind, error, trace)

    def step_done(self, steps: int) -> None:
        """Take the ledger off once it has counted enough steps.

        Args:
            steps: optimizer steps done while it was there.
        """
        if self._counting and not self._enforced and steps >= _STEPS_TO_COUNT:
            self.__exit__(None, None, None)

    @contextmanager
    def counting(self, *, unless: bool = False) -> Iterator[None]:
        """Count inside although the ledger was taken off; it still follows what it knew.

        Args:
            unless: leave it off, as this was counted before.
        """
        if self._counting or unless:
            yield
            return
        with self:
            yield

    def table(self) -> MemoryTable:
        """What was measured, by phase, tier and kind."""
        return self.ledger.table()

    def device_bytes(self) -> int | None:
        """Living on the device now, None when nobody counts."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self.ledger.total_bytes(Tier.DEVICE) if self._counting else None

    def device_peak_bytes(self) -> int:
        """The highest so far, as far as anybody counted."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self.ledger.peak_bytes(Tier.DEVICE)


def _prepare_card(device: torch.device, limit_bytes: int | None) -> None:
    """Limit the allocator, and forget the peak that measuring the machine's rates made."""
    torch.cuda.init()  # the counters are not there before
    torch.cuda.reset_peak_memory_stats(device)
    if limit_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
