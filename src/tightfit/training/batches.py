"""Orders samples into optimizer steps and micro-batches, and pads them into tensors.

Does not know models or losses. A step's loss is the sum over its trained tokens divided by
`trained_tokens` of the whole global batch, so micro-batches do not change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tightfit.facts.labels import IGNORED
from tightfit.training.samples import Sample

_NOTHING = Sample(input_ids=(0, 0), labels=(IGNORED, IGNORED), file="", row=0)


@dataclass(frozen=True)
class Batch:
    """A padded micro-batch.

    Attributes:
        input_ids: int64 `[batch, seq]`.
        labels: int64 `[batch, seq]`; -100 where nothing is learned. Label i belongs to token i
            and is predicted from position i - 1.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


def epoch_order(samples: Sequence[Sample], seed: int, epoch: int) -> list[int]:
    """Indices of `samples` in the order of one epoch, the same on every machine.

    In epoch 0 the longest sample comes first: what will not fit fails in the first step.
    """
    generator = torch.Generator().manual_seed(_mixed_seed(seed, epoch))
    order: list[int] = torch.randperm(len(samples), generator=generator).tolist()
    if epoch == 0 and order:
        longest = max(order, key=lambda index: len(samples[index].input_ids))
        order.remove(longest)
        order.insert(0, longest)
    return order


def global_batches(
    samples: Sequence[Sample], global_batch_size: int, seed: int, epoch: int
) -> Iterator[list[Sample]]:
    """The samples of each optimizer step of an epoch; the last step may have fewer."""
    order = epoch_order(samples, seed, epoch)
    for start in range(0, len(order), global_batch_size):
        yield [samples[index] for index in order[start : start + global_batch_size]]


def micro_batches(samples: Sequence[Sample], micro_batch_size: int) -> Iterator[list[Sample]]:
    """`samples` cut into pieces of `micro_batch_size`; the last one may be smaller."""
    for start in range(0, len(samples), micro_batch_size):
        yield list(samples[start : start + micro_batch_size])


def rounds(
    samples: Sequence[Sample], micro_batch_size: int, rank: int, ranks: int
) -> list[list[Sample]]:
    """The micro-batches of one of several ranks that share `samples` out.

    All ranks have as many, since they wait for each other in each: where nothing is left for one,
    it gets a sample of which nothing is trained.
    """
    dealt = list(micro_batches(samples, micro_batch_size))
    missing = -len(dealt) % ranks
    return [*dealt, *[[_NOTHING]] * missing][rank::ranks]


def collate(samples: Sequence[Sample], pad_token_id: int) -> Batch:
    """Pads samples on the right to the longest of them: int64 `[batch, seq]`.

    There is no attention mask, as none is needed: causal attention never looks right, where the
    padding is, and padding has the label -100.
    """
    length = max(len(sample.input_ids) for sample in samples)
    return Batch(
        input_ids=_padded([sample.input_ids for sample in samples], length, pad_token_id),
        labels=_padded([sample.labels for sample in samples], length, IGNORED),
    )


def average_padded_length(samples: Sequence[Sample], global_batch_size: int, seed: int) -> float:
    """Tokens per sample of the first epoch when each global batch is one padded batch."""
    batches = list(global_batches(samples, global_batch_size, seed, epoch=0))
    padded = sum(len(b) * max(len(sample.input_ids) for sample in b) for b in batches)
    return padded / len(samples)


def trained_tokens(samples: Sequence[Sample]) -> int:
    """How many positions carry loss; the first token of a sample is never predicted."""
    return sum(sample.trained_tokens for sample in samples)


def _padded(rows: Sequence[Sequence[int]], length: int, value: int) -> torch.Tensor:
    """int64 `[len(rows), length]`."""
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)


def _mixed_seed(seed: int, epoch: int) -> int:
    """A seed of 63 bits in which neighbouring seeds and epochs have nothing in common."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
