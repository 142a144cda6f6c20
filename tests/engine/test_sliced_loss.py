"""The loss in slices of the vocabulary, against the loss of all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.postponed import PostponedTransfer
from torch import nn

from tightfit.bill.table import Kind, Phase
from tightfit.engine import apply
from tightfit.engine.apply import fit
from tightfit.engine.sliced_loss import SlicedLoss
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    LossKind,
    LossPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    Tier,
)

Make = Callable[..., Any]
VOCABULARY, HIDDEN = 23, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # other orders of fp32 sums
HOST = Tier.HOST


def head_and_inputs(
    *, bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(2, 7, HIDDEN).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, 7))
    labels[0, 2:4] = -100
    return head, hidden, labels


def full_loss(
    hidden: torch.Tensor, labels: torch.Tensor, head: nn.Linear, trained: int | None
) -> torch.Tensor:
    logits = head(hidden).float()[:, :-1].reshape(-1, VOCABULARY)
    targets = labels[:, 1:].reshape(-1)
    total = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return total / ((targets != -100).sum() if trained is None else trained)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [None, 5])
@pytest.mark.parametrize("slice_rows", [1, 5, VOCABULARY, 100])
def test_it_is_the_loss_of_all_logits(bias: bool, trained: int | None, slice_rows: int) -> None:
    results = []
    for sliced in (True, False):
        head, hidden, labels = head_and_inputs(bias=bias)
        loss = (
            SlicedLoss(head, slice_rows)(hidden, labels, trained)
            if sliced
            else full_loss(hidden, labels, head, trained)
        )
        (loss * 3).backward()
        results.append([loss, hidden.grad, *(p.grad for p in head.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_large_logits_do_not_overflow() -> None:
    head, hidden, labels = head_and_inputs(bias=False)
    loss = SlicedLoss(head, 5)(hidden * 1e4, labels, None)
    torch.testing.assert_close(loss, full_loss(hidden * 1e4, labels, head, None))
    loss.backward()
    assert bool(hidden.grad.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_only_the_wanted_gradients_are_made(frozen: str) -> None:
    head, hidden, labels = head_and_inputs(bias=True)
    (head if frozen == "head" else hidden).requires_grad_(False)
    SlicedLoss(head, 5)(hidden, labels, None).backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (head.weight.grad is None) == (frozen == "head")


def test_no_more_than_a_slice_of_logits_lives(make_model: Make, make_batch: Make) -> None:
    ids, labels = make_batch(0)
    with Ledger() as counting:
        model = make_model()
        counting.adopt(model)
        engine = fit(model, Policies(loss=LossPolicy(LossKind.SLICED, slice_rows=4)))
        engine.backward(engine.loss(ids, labels, 40))
    most = max(tiers[Tier.DEVICE].get(Kind.LOGITS, 0) for tiers in counting.sections().values())
    assert 0 < most <= 2 * ids.numel() * 4 * 4  # the one before lives while one is made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapter", [None, AdapterPolicy(rank=2)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_weights_gradient_leaves_slice_by_slice(
    make_model: Make,
    make_batch: Make,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    adapter: AdapterPolicy | None,
    accumulation: int,
) -> None:
    """The same numbers; with several micro-batches a tied gradient's sums have another order."""
    monkeypatch.setattr(apply, "Transfer", PostponedTransfer)
    policies = [
        Policies(
            placement=placement,
            batch=BatchPolicy(4, accumulation),
            loss=LossPolicy(LossKind.SLICED, slice_rows=10),
            adapter=adapter,
            optimizer=OptimizerPolicy(learning_rate=1e-2),
        )
        for placement in (PlacementPolicy(), PlacementPolicy(HOST, HOST, HOST, lazy_step=True))
    ]
    runs = []
    for each in policies:
        torch.manual_seed(3)
        engine = fit(make_model(tie_word_embeddings=tied), each)
        norms = []
        for step in range(4):
            for piece in range(accumulation):
                ids, labels = make_batch(10 * step + piece)
                engine.backward(engine.loss(ids, labels, 40 * accumulation))
            norms.append(engine.step())
        runs.append((norms, engine.model.state_dict()))
    (expected, parameters), (found, placed) = runs
    exact = adapter is not None or accumulation == 1 or not tied
    assert found == expected if exact else found == pytest.approx(expected, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(placed[name], value, rtol=0, atol=0 if exact else 1e-5)


def test_the_device_never_has_the_vocabularys_gradient_whole_before_the_embeddings(
    make_model: Make, make_batch: Make
) -> None:
    ids, labels = make_batch(0)
    peaks = {}
    for kind in (LossKind.CHUNKED, LossKind.SLICED):
        with Ledger() as counting:
            model = make_model(vocab_size=4000)
            counting.adopt(model, HOST)
            policies = Policies(
                placement=PlacementPolicy(HOST, HOST, HOST, prefetch=0),
                loss=LossPolicy(kind, chunk_tokens=2, slice_rows=100),
            )
            engine = fit(model, policies)
            engine.backward(engine.loss(ids, labels, 40))
        table = counting.table()
        most = max(table.phase_peak_bytes(p, Tier.DEVICE) for p in (Phase.FORWARD, Phase.BACKWARD))
        peaks[kind] = most / (4 * model.lm_head.weight.numel())
    assert peaks[LossKind.CHUNKED] > 3
    assert peaks[LossKind.SLICED] < 1.6
