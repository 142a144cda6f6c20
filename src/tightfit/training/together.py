"""What the ranks of a run say to each other between steps: objects, and errors of any of them.

Everything is over the host, with no device involved; with one rank nothing is sent. Every rank must
call the same in the same order. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from tightfit.errors import TrainingError

Item = TypeVar("Item")


def rank() -> int:
    """This process's, of all ranks of the run; 0 where it is the only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_all(item: Item) -> list[Item]:
    """The items of all ranks, in their order; small ones."""
    if not dist.is_initialized():
        return [item]
    items: list[Item] = [item] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def from_first(item: Item) -> Item:
    """Rank 0's item, on every rank."""
    return from_all(item)[0]


@contextmanager
def failing_together(*kinds: type[Exception]) -> Iterator[None]:
    """What is done inside has been done by all ranks afterwards, or has failed on all.

    Args:
        kinds: of errors that one rank may have and that the others are told of. One that waits
            for it inside is told by its time-out only: use nothing that waits.

    Raises:
        TrainingError: another rank failed; its message is that of the first that did.
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
            raise TrainingError(f"rank {number} failed: {message}")
