"""What a card's engine page-locks on the host, among fake tensors that nobody can lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightfit.engine import transfer
from tightfit.policies import Tier


@contextmanager
def pinned_host() -> Iterator[None]:
    """Inside, what the engine keeps on the host is on the tier where it is with a card."""
    original = transfer.host_tier_of
    transfer.host_tier_of = _as_with_a_card
    try:
        yield
    finally:
        transfer.host_tier_of = original


def _as_with_a_card(device: torch.device) -> Tier:
    """See `transfer.host_tier_of`; fake tensors are on the CPU whatever they stand for."""
    return Tier.PINNED
