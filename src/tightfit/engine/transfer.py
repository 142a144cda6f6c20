"""The engine's copies between device and host, in one place that can be asynchronous.

On CUDA copies run on a side stream and are ordered by events; on the CPU they are plain copies
between storages that the ledger counts on different tiers. Knows nothing of what is copied.
"""

from __future__ import annotations

import torch

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.policies import Tier


class Transfer:
    """Copies for one device. Sources stay untouched until `wait` returns.

    Args:
        device: the accelerator, or the CPU standing in for one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def host_tier(self) -> Tier:
        """Where `empty_on_host` allocates: page-locked memory if there is a card."""
        return Tier.PINNED if self._stream is not None else Tier.HOST

    def empty_on_host(
        self, like: torch.Tensor, kind: Kind, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An uninitialised host tensor of `like`'s shape, page-locked if there is a card."""
        with ledger.labelled(kind, self.host_tier):
            return torch.empty(
                like.shape,
                dtype=dtype or like.dtype,
                device="cpu",
                pin_memory=self._stream is not None,
            )

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tiers, after what the current stream has queued."""
        if self._stream is None:
            destination.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        for tensor in (destination, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Return when every copy so far has arrived, on host and device."""
        if self._stream is not None:
            self._stream.synchronize()
