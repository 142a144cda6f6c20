"""What there is besides the device. Knows nothing of what is kept there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightfit.engine.pipeline import DiskTier
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer


@dataclass(frozen=True)
class Elsewhere:
    """The other tiers of one engine, and the way there.

    Attributes:
        transfer: copies between the device and the host.
        slab: the host memory of what travels.
        disk: None where nothing is placed on one.
    """

    transfer: Transfer
    slab: HostSlab
    disk: DiskTier | None

    @property
    def device(self) -> torch.device:
        """Where parameters compute."""
        return self.transfer.device

    def allocate(self) -> None:
        """Get the host memory, when all have said how much they need."""
        if self.disk is not None:
            self.disk.buffers.reserve(self.slab)
        self.slab.allocate()
