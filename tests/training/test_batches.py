"""Every sample once an epoch, in an order that depends on seed and epoch only; padding is inert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightfit.facts.labels import IGNORED
from tightfit.training.batches import (
    average_padded_length,
    collate,
    epoch_order,
    global_batches,
    micro_batches,
    trained_tokens,
)
from tightfit.training.samples import Sample


def sample(*labels: int, row: int = 1) -> Sample:
    """Tokens are 10, 11, ...; a label of 0 is masked."""
    ids = tuple(range(10, 10 + len(labels)))
    masked = tuple(token if label else IGNORED for token, label in zip(ids, labels, strict=True))
    return Sample(ids, masked, "data.jsonl", row)


SAMPLES = [sample(*[0, *[1] * length], row=length) for length in (3, 1, 4, 9, 5, 2, 6)]


def test_order_is_a_shuffle_with_the_longest_first() -> None:
    order = epoch_order(SAMPLES, seed=42, epoch=0)
    assert sorted(order) == list(range(7))
    assert order[0] == 3
    assert order == epoch_order(SAMPLES, seed=42, epoch=0)
    later = [epoch_order(SAMPLES, seed, epoch) for seed in (1, 2) for epoch in (1, 2)]
    assert len({tuple(order) for order in later}) == 4
    assert any(order[0] != 3 for order in later)


def test_order_of_a_seed_stays() -> None:
    assert epoch_order(SAMPLES, seed=42, epoch=1) == [6, 3, 2, 1, 5, 0, 4]


def test_order_without_samples() -> None:
    assert epoch_order([], seed=0, epoch=0) == []


def test_global_batches_cover_an_epoch() -> None:
    batches = list(global_batches(SAMPLES, 3, seed=1, epoch=0))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert batches[0][0].row == 9
    assert sorted(sample.row for batch in batches for sample in batch) == [1, 2, 3, 4, 5, 6, 9]


def test_collate() -> None:
    batch = collate([sample(0, 1), sample(0, 0, 1, 1)], pad_token_id=7)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.tolist() == [[10, 11, 7, 7], [10, 11, 12, 13]]
    assert batch.labels.tolist() == [[-100, 11, -100, -100], [-100, -100, 12, 13]]


@pytest.mark.parametrize(
    ("labels", "count"), [((1, 1, 1), 2), ((0, 1, 0), 1), ((1, 0, 0), 0), ((1,), 0), ((0, 1, 1), 2)]
)
def test_the_first_label_never_counts(labels: tuple[int, ...], count: int) -> None:
    assert sample(*labels).trained_tokens == trained_tokens([sample(*labels)]) == count


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9),
    size=st.integers(1, 10),
)
def test_trained_tokens_do_not_depend_on_micro_batches(rows: list[list[int]], size: int) -> None:
    samples = [sample(*labels) for labels in rows]
    pieces = list(micro_batches(samples, size))
    assert [part for piece in pieces for part in piece] == samples
    total = trained_tokens(samples)
    assert sum(trained_tokens(piece) for piece in pieces) == total
    shifted = [collate(piece, pad_token_id=2).labels[:, 1:] for piece in pieces]
    assert sum(int((labels != IGNORED).sum()) for labels in shifted) == total


def test_padding_changes_no_logits(tiny_model_folder: str) -> None:
    """Why there is no attention mask: what stands right of a token is never read."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()
    short = sample(0, 1, 1)
    with torch.no_grad():
        alone = model(collate([short], pad_token_id=2).input_ids).logits[0]
        padded = model(collate([short, SAMPLES[3]], pad_token_id=2).input_ids).logits[0, :3]
    torch.testing.assert_close(alone, padded)


def test_average_padded_length_counts_what_collate_makes() -> None:
    made = [collate(batch, 0).input_ids.numel() for batch in global_batches(SAMPLES, 3, 1, 0)]
    assert average_padded_length(SAMPLES, 3, seed=1) == sum(made) / len(SAMPLES)
    assert average_padded_length(SAMPLES, 1, seed=1) == sum(
        len(sample.input_ids) for sample in SAMPLES
    ) / len(SAMPLES)
