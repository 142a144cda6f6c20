"""What a card's engine page-locks on the host, among fake tensors that nobody can lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightfit import ledger
from tightfit.bill.runtime import pinned_block_bytes
from tightfit.bill.table import Kind
from tightfit.engine.transfer import Transfer
from tightfit.policies import Tier


@contextmanager
def pinned_host() -> Iterator[None]:
    """Inside, host tensors of the engine are as large, and on the tier, as with a card."""
    original = Transfer.empty_on_host
    Transfer.empty_on_host = _empty_block  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transfer.empty_on_host = original  # type: ignore[method-assign]


def _empty_block(
    self: Transfer, like: torch.Tensor, kind: Kind, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `Transfer.empty_on_host`; torch locks whole blocks."""
    dtype = dtype or like.dtype
    size = like.numel() * dtype.itemsize
    with ledger.labelled(kind, Tier.PINNED):
        block = torch.empty(pinned_block_bytes(size), dtype=torch.uint8)
    return block[:size].view(dtype).view(like.shape)
