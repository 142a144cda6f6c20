"""Cross-entropy in slices of the vocabulary: neither logits nor the weight's gradient are whole.

Forward goes over the output layer's rows a slice at a time and keeps, of all logits, the normaliser
of each token (an online log-sum-exp, https://arxiv.org/abs/1805.02867). Backward makes the logits
of each slice again, as Cut Cross-Entropy does (https://arxiv.org/abs/2411.09009): a product more
than `engine/loss.py` takes, which keeps the gradients of all rows from forward to backward. The
weight's gradient is final slice by slice, so that it can leave the device as it comes. Knows
nothing of where gradients go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.loss_terms import NO_TERMS, LossTerms
from tightfit.engine.vocabulary import Vocabulary, part_of
from tightfit.facts.labels import IGNORED
from tightfit.ledger import local_part

Deliver = Callable[[nn.Parameter, Iterator[torch.Tensor]], None]


def next_token_targets(
    labels: torch.Tensor, trained_tokens: int | torch.Tensor | None
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """What each position is trained to predict, `[tokens]`, and what the sum is divided by.

    Args:
        labels: `[batch, seq]`; the target of position i is label i + 1, of the last none.
        trained_tokens: the divisor; the count of targets that are not -100 when None.
    """
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    return targets, (targets != IGNORED).sum() if trained_tokens is None else trained_tokens


class SlicedLoss:
    """The loss of one output layer.

    Args:
        head: `[vocab, hidden]`.
        slice_rows: rows whose logits live at the same time.
        vocabulary: which rows of the output layer this rank has; slices are of those.
        terms: of the loss beside cross-entropy.

    Attributes:
        prepare: called before backward reads the weight, which may have left the device.
        deliver: takes the weight's gradient in consecutive rows; None hands it to autograd whole.
    """

    def __init__(
        self,
        head: nn.Linear,
        slice_rows: int,
        vocabulary: Vocabulary | None = None,
        terms: LossTerms = NO_TERMS,
    ) -> None:
        self.head = head
        self.slice_rows = slice_rows
        self.vocabulary = vocabulary or Vocabulary()
        self.terms = terms
        self.prepare: Callable[[], None] = _nothing
        self.deliver: Deliver | None = None

    def __call__(
        self, hidden: torch.Tensor, labels: torch.Tensor, trained_tokens: int | torch.Tensor | None
    ) -> torch.Tensor:
        """Mean next-token cross-entropy over the labels that are not -100.

        Args:
            hidden: `[batch, seq, hidden]`, what the output layer would receive.
            labels: `[batch, seq]`; position i is trained to predict label i + 1.
            trained_tokens: divisor of the sum; the count of these labels when None.
        """
        targets, divisor = next_token_targets(labels, trained_tokens)
        flat = self.vocabulary.enter(hidden.reshape(-1, hidden.shape[-1]))
        head = self.head
        bias = None if head.bias is None else part_of(head.bias)
        loss: torch.Tensor = _SlicedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            flat, part_of(head.weight), bias, targets, divisor, self, self.terms.trained()
        )
        return loss

    @property
    def weight(self) -> torch.Tensor:
        """What this rank has of the layer's weight now, `[rows, hidden]`."""
        return local_part(self.head.weight).detach()

    @property
    def bias(self) -> torch.Tensor | None:
        """What this rank has of its bias, `[rows]`."""
        return None if self.head.bias is None else local_part(self.head.bias).detach()


class _SlicedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over `divisor`; asks the layer, not saved tensors, for its weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        divisor: int | torch.Tensor,
        layer: SlicedLoss,
        terms: LossTerms,
    ) -> torch.Tensor:
        """`hidden` is `[tokens, hidden]`, `targets` `[tokens]`."""
        normaliser, at_target, mean = _normalisers(hidden, targets, layer)
        ctx.save_for_backward(hidden, normaliser)
        ctx.targets, ctx.divisor, ctx.layer = targets, divisor, layer
        losses = normaliser - at_target
        if terms != NO_TERMS:
            losses += terms.added(normaliser, at_target, mean)
        return torch.where(targets == IGNORED, 0.0, losses).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Make each slice's logits again and from them what they give to each gradient."""
        hidden, normaliser = ctx.saved_tensors
        ctx.layer.prepare()
        trained = (ctx.targets != IGNORED) * (loss_grad / ctx.divisor)
        gradients = _Gradients(ctx, hidden, normaliser, trained)
        return (*gradients.all(), None, None, None, None)


def _normalisers(
    hidden: torch.Tensor, targets: torch.Tensor, layer: SlicedLoss
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logarithm of the sum of exponentials of each token's logits, the target's logit, and
    their mean if the loss needs it."""
    tokens = hidden.shape[0]
    highest = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=hidden.device)
    total = torch.zeros_like(highest)
    at_target = torch.zeros_like(highest)
    mean = torch.zeros_like(highest)
    for rows in _slices(layer):
        logits = _logits(hidden, rows, layer)
        at_target += _at_targets(logits, targets, rows, layer.vocabulary)
        mean += layer.terms.sum_of(logits)
        higher = torch.maximum(highest, logits.amax(1))
        total *= (highest - higher).exp_()
        total += logits.sub_(higher.unsqueeze(1)).exp_().sum(1)
        highest = higher
    return _over_all_parts(highest, torch.stack([total, at_target, mean]), layer.vocabulary)


def _over_all_parts(
    highest: torch.Tensor, sums: torch.Tensor, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `_normalisers`, from what each part of the vocabulary gives."""
    if vocabulary.group is not None:
        higher = vocabulary.highest(highest.clone())
        sums[0] *= (highest - higher).exp_()
        highest = higher
        sums = vocabulary.total(sums)
    total, at_target, mean = sums
    return total.log_().add_(highest), at_target, mean


def _slices(layer: SlicedLoss) -> Iterator[slice]:
    here = layer.weight.shape[0]
    for first in range(0, here, layer.slice_rows):
        yield slice(first, min(first + layer.slice_rows, here))


def _logits(hidden: torch.Tensor, rows: slice, layer: SlicedLoss) -> torch.Tensor:
    """fp32 `[tokens, rows]`."""
    bias = None if layer.bias is None else layer.bias[rows].to(hidden.dtype)
    logits = nn.functional.linear(hidden, layer.weight[rows].to(hidden.dtype), bias).float()
    ledger.mark(logits, Kind.LOGITS)
    return logits


def _at_targets(
    logits: torch.Tensor, targets: torch.Tensor, rows: slice, vocabulary: Vocabulary
) -> torch.Tensor:
    """The logit of each token whose target is among `rows`, 0 of others."""
    inside, index = vocabulary.within(targets, rows)
    return torch.where(inside, logits.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)


class _Gradients:
    """The gradients of one backward.

    Args:
        ctx: of the function; says which gradients are wanted.
        hidden: `[tokens, hidden]`.
        normaliser: `[tokens]`, see `_normalisers`.
        trained: `[tokens]`, what the loss of each token counts in the end; 0 of those ignored.
    """

    def __init__(
        self, ctx: Any, hidden: torch.Tensor, normaliser: torch.Tensor, trained: torch.Tensor
    ) -> None:
        self._layer: SlicedLoss = ctx.layer
        self._targets: torch.Tensor = ctx.targets
        self._inputs = hidden, normaliser, trained
        wanted = ctx.needs_input_grad
        with ledger.labelled(Kind.GRADIENTS):
            # fp32, as it adds up over slices.
            self._hidden = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
            bias = self._layer.bias
            self._bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
            whole = wanted[1] and self._layer.deliver is None
            self._weight = torch.empty_like(self._layer.weight) if whole else None
        self._delivers = wanted[1] and not whole

    def all(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of hidden states, weight and bias; None where it is not wanted or was delivered."""
        head = self._layer.head
        if self._delivers:
            assert self._layer.deliver is not None
            assert isinstance(head.weight, nn.Parameter)
            self._layer.deliver(head.weight, self._weight_slices())
        else:
            for _ in self._weight_slices():
                pass
        hidden = None if self._hidden is None else self._hidden.to(self._inputs[0].dtype)
        return hidden, self._weight, self._bias

    def _weight_slices(self) -> Iterator[torch.Tensor]:
        """Everything of one slice after the other; gives the weight's rows where they leave."""
        hidden, normaliser, trained = self._inputs
        layer = self._layer
        for rows in _slices(layer):
            logits = _logits(hidden, rows, layer).sub_(normaliser.unsqueeze(1)).exp_()
            layer.terms.scaled(logits, normaliser)
            inside, index = layer.vocabulary.within(self._targets, rows)
            layer.terms.subtract_targets(logits, inside, index)
            logits *= trained.unsqueeze(1)
            if self._bias is not None:
                self._bias[rows] = logits.sum(0)
            narrow = logits.to(hidden.dtype)
            if self._hidden is not None:
                self._hidden += narrow @ layer.weight[rows].to(hidden.dtype)
            if self._weight is not None and self._weight.dtype is hidden.dtype:
                torch.mm(narrow.T, hidden, out=self._weight[rows])
            elif self._weight is not None:  # trained in fp32 on a base of 16 bits
                self._weight[rows] = narrow.T @ hidden
            elif self._delivers:
                yield (narrow.T @ hidden).to(layer.weight.dtype)


def _nothing() -> None:
    """The weight is where it always is."""
