"""Label smoothing and z-loss: torch's own smoothing and the formula of z-loss, in every loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.engine.apply import fit
from tightfit.engine.loss import chunked_causal_loss
from tightfit.engine.loss_terms import LossTerms
from tightfit.engine.sliced_loss import SlicedLoss
from tightfit.policies import LossKind, LossPolicy, Policies

Make = Callable[..., Any]
VOCABULARY, HIDDEN = 23, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # other orders of fp32 sums
TERMS = [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)]


def expected_loss(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    flat, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    smoothed = nn.functional.cross_entropy(flat, targets, label_smoothing=label_smoothing)
    return smoothed + z_loss * flat.logsumexp(1)[targets != -100].square().mean()


@pytest.mark.parametrize(("label_smoothing", "z_loss"), TERMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pieces", [3, 7, 100])
def test_chunks_and_slices_have_the_loss_and_gradients_of_the_whole(
    label_smoothing: float, z_loss: float, bias: bool, pieces: int
) -> None:
    terms = LossTerms(label_smoothing, z_loss, VOCABULARY)
    results = []
    for kind in LossKind:
        torch.manual_seed(0)
        head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
        # Normalisers far from 0, which z-loss is about.
        hidden = (4 * torch.randn(2, 10, HIDDEN)).requires_grad_()
        labels = torch.randint(0, VOCABULARY, (2, 10))
        labels[0, :4] = labels[1, 7] = -100
        if kind is LossKind.FULL:
            loss = expected_loss(head(hidden), labels, label_smoothing, z_loss)
        elif kind is LossKind.CHUNKED:
            loss = chunked_causal_loss(hidden, labels, head, pieces, terms=terms)
        else:
            loss = SlicedLoss(head, pieces, terms=terms)(hidden, labels, None)
        (loss * 3).backward()
        results.append([loss, hidden.grad, *(p.grad for p in head.parameters())])
    for found in results[1:]:
        for own, whole in zip(found, results[0], strict=True):
            torch.testing.assert_close(own, whole, **CLOSE)


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize(("label_smoothing", "z_loss"), TERMS)
def test_a_model_is_trained_with_them_and_evaluated_without(
    kind: LossKind, label_smoothing: float, z_loss: float, make_model: Make, make_batch: Make
) -> None:
    plain, model = make_model(), make_model()
    inputs, labels = make_batch(1)
    logits = plain(inputs).logits
    expected = expected_loss(logits, labels, label_smoothing, z_loss)
    expected.backward()
    policy = LossPolicy(kind, 5, 9, label_smoothing=label_smoothing, z_loss=z_loss)
    engine = fit(model, Policies(loss=policy))
    trained = int((labels[:, 1:] != -100).sum())
    loss = engine.loss(inputs, labels, trained)
    engine.backward(loss)
    torch.testing.assert_close(loss.detach(), expected.detach(), **CLOSE)
    for (name, own), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, whole.grad, **CLOSE, msg=name)
    with torch.no_grad():
        evaluated = model(inputs, labels=labels).loss
    torch.testing.assert_close(evaluated, expected_loss(logits, labels, 0.0, 0.0), **CLOSE)
