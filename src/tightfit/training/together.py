"""What the ranks of a run say to each other between steps: objects, and errors of any of them.

With one rank nothing is sent. Every rank must call the same in the same order. Knows nothing of
models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.errors import OtherRankError

Item = TypeVar("Item")


def rank() -> int:
    """This process's, of all ranks of the run; 0 where it is the only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_all(item: Item) -> list[Item]:
    """The items of all ranks, in their order; small ones. No ledger counts what carries them, so
    that a rank whose memory has run out can still say so."""
    if not dist.is_initialized():
        return [item]
    items: list[Item] = [item] * dist.get_world_size()
    with _disable_current_modes():
        dist.all_gather_object(items, item)
    return items


def any_of(flag: bool) -> bool:
    """Whether it is set on any rank."""
    if not dist.is_initialized():
        return flag
    number = torch.tensor(int(flag), device=_device())
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def _device() -> torch.device:
    """Where numbers can be sent from: the host, unless the group knows cards alone."""
    on_cards = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cards else torch.device("cpu")


@contextmanager
def failing_together(*kinds: type[Exception]) -> Iterator[None]:
    """What is done inside has been done by all ranks afterwards, or has failed on all.

    Args:
        kinds: of errors that one rank may have and that the others are told of. One that waits
            for it inside is told by its time-out only: use nothing that waits.

    Raises:
        OtherRankError: another rank failed; its message is that of the first that did.
    """
    error: Exception | None = None
    try:
        yield
    except kinds as caught:
        error = caught
    said = from_all(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, message in enumerate(said):
        if message is not None:
            raise OtherRankError(f"rank {number} failed: {message}")
