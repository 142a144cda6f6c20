"""Cross-entropy from hidden states in chunks of tokens, so that all logits never exist at once.

The logits of a chunk turn into its gradients in place and in the same pass, as in Liger Kernel
(https://arxiv.org/abs/2410.10989): forward leaves the gradients of hidden states and weight
behind and backward hands them out. The model's forward stays the way in: called with labels, its
output layer passes hidden states through and its loss function works on them; called without
labels, it is what it was. Where ranks share the vocabulary, a chunk's logits are this rank's part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.loss_scale import LossScale
from tightfit.engine.loss_terms import NO_TERMS, LossTerms
from tightfit.engine.sliced_loss import SlicedLoss, next_token_targets
from tightfit.engine.vocabulary import Vocabulary, part_of
from tightfit.errors import UnsupportedError
from tightfit.facts.labels import IGNORED
from tightfit.facts.logits import logit_transform
from tightfit.policies import LossKind, LossPolicy

_LossOfHidden = Callable[[torch.Tensor, torch.Tensor, "int | torch.Tensor | None"], torch.Tensor]


def apply_loss(
    model: PreTrainedModel,
    policy: LossPolicy,
    vocabulary: Vocabulary | None = None,
    loss_scale: LossScale | None = None,
) -> SlicedLoss | None:
    """Make `model(..., labels=...)` compute its loss as the policy says; the loss if it is sliced.

    Args:
        vocabulary: which rows of the output layer this rank has; None: all.
        loss_scale: of gradients in fp16: those that forward makes are scaled already.

    Raises:
        UnsupportedError: the model has no output layer that another loss can take over.
    """
    head = model.get_output_embeddings()
    if policy.kind is LossKind.FULL:
        if head is not None:
            head.register_forward_hook(_mark_logits)
            if policy.has_terms:
                model.loss_function = functools.partial(_full_loss, LossTerms.of(policy, head))
        return None
    transform = logit_transform(model.config.to_dict())
    if transform is not None or type(head) is not nn.Linear:
        reason = f"its config has {transform}" if transform else f"its output layer is {type(head)}"
        raise UnsupportedError(
            f"{policy.kind} loss does not work for this model: {reason}; set loss: full"
        )
    vocabulary, terms = vocabulary or Vocabulary(), LossTerms.of(policy, head)
    if policy.kind is LossKind.SLICED:
        sliced = SlicedLoss(head, policy.slice_rows, vocabulary, terms)
        _take_over_forward(model, head, sliced)
        return sliced

    def chunked(
        hidden: torch.Tensor, labels: torch.Tensor, trained_tokens: int | torch.Tensor | None
    ) -> torch.Tensor:
        scale = 1.0 if loss_scale is None else loss_scale.value
        return chunked_causal_loss(
            hidden, labels, head, policy.chunk_tokens, trained_tokens, vocabulary, scale, terms
        )

    _take_over_forward(model, head, chunked)
    return None


def _take_over_forward(model: PreTrainedModel, head: nn.Linear, loss: _LossOfHidden) -> None:
    plain_forward = model.forward
    passed: list[torch.Tensor] = []

    @functools.wraps(plain_forward)
    def forward(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain_forward(*args, **kwargs)
        with _passing_through(head, passed):
            output = plain_forward(*args, labels=labels, **kwargs)
        if isinstance(output, tuple):  # return_dict=False
            return (output[0], None, *output[2:])
        output.logits = None
        return output

    def loss_function(
        logits: torch.Tensor, labels: torch.Tensor, vocab_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:  # models give the vocabulary's size by position or by name
        _check_untouched(logits, passed)
        return loss(logits, labels, kwargs.get("num_items_in_batch"))

    model.forward = forward
    model.loss_function = loss_function


@contextmanager
def _passing_through(head: nn.Linear, passed: list[torch.Tensor]) -> Iterator[None]:
    """The output layer returns its input inside, and puts it into `passed`."""
    before = head.__dict__.get("forward")

    def identity(hidden: torch.Tensor) -> torch.Tensor:
        passed.append(hidden)
        return hidden

    head.forward = identity  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before  # type: ignore[method-assign]
        passed.clear()


def _check_untouched(logits: torch.Tensor, passed: list[torch.Tensor]) -> None:
    """See that what reaches the loss is what the output layer returned.

    Raises:
        UnsupportedError: the model changes its logits in a way that its config does not tell.
    """
    if len(passed) != 1 or logits is not passed[0]:
        raise UnsupportedError(
            "chunked and sliced losses do not work for this model: it changes the logits between "
            "its output layer and the loss; set loss: full"
        )


def chunked_causal_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: nn.Linear,
    chunk_tokens: int,
    trained_tokens: int | torch.Tensor | None = None,
    vocabulary: Vocabulary | None = None,
    scale: float = 1.0,
    terms: LossTerms = NO_TERMS,
) -> torch.Tensor:
    """Mean next-token cross-entropy over the labels that are not -100, with `terms`.

    Args:
        hidden: `[batch, seq, hidden]`, what the output layer would receive.
        labels: `[batch, seq]`; position i is trained to predict label i + 1.
        head: the output layer, `[vocab, hidden]`.
        chunk_tokens: positions whose logits live at the same time.
        trained_tokens: divisor of the sum; the count of these labels when None.
        vocabulary: which rows of the output layer this rank has; None: all.
        scale: of the gradients between forward and backward, which begins with it: they are of the
            weight's type, in which small ones may vanish. The loss itself is not scaled.
    """
    vocabulary = vocabulary or Vocabulary()
    targets, divisor = next_token_targets(labels, trained_tokens)
    flat = vocabulary.enter(hidden.reshape(-1, hidden.shape[-1]))
    weight, bias = part_of(head.weight), None if head.bias is None else part_of(head.bias)
    with_gradients = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat,
        weight,
        bias,
        _Targets(targets, vocabulary, terms.trained()),
        divisor,
        chunk_tokens,
        with_gradients,
        scale,
    )
    return loss


def chunks_of(tokens: int, chunk_tokens: int) -> Sequence[slice]:
    """Positions whose logits live at the same time, all of them in turn."""
    return [slice(start, start + chunk_tokens) for start in range(0, tokens, chunk_tokens)]


@dataclass(frozen=True)
class _Targets:
    """What each position is trained to predict, and which rows of it are here.

    Attributes:
        tokens: `[tokens]`, numbers of the whole vocabulary, or -100.
    """

    tokens: torch.Tensor
    vocabulary: Vocabulary
    terms: LossTerms

    def __getitem__(self, piece: slice) -> _Targets:
        return _Targets(self.tokens[piece], self.vocabulary, self.terms)

    def within(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets are among these logits, `[tokens, rows]`, and where."""
        return self.vocabulary.within(self.tokens, slice(0, logits.shape[1]))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over `divisor`, gradients computed in forward.

    Gradients of weight and bias add up over chunks in fp32 whatever the weight's type, so that
    the number of chunks does not change their rounding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: _Targets,
        divisor: int | torch.Tensor,
        chunk_tokens: int,
        with_gradients: bool,
        scale: float,
    ) -> torch.Tensor:
        """See `chunked_causal_loss`; `hidden` is `[tokens, hidden]`."""
        gradients = _Gradients.empty(ctx, hidden, weight, bias) if with_gradients else None
        ctx.types = hidden.dtype, weight.dtype, weight.dtype
        # A weight that is trained in fp32 on a base of 16 bits computes in these.
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        part = divisor if scale == 1.0 else divisor / scale
        for piece in chunks_of(hidden.shape[0], chunk_tokens):
            loss += _chunk(hidden, weight, bias, targets[piece], piece, part, gradients)
        ctx.gradients = gradients
        ctx.scale = scale
        return loss / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Hand out the gradients that forward made, times `loss_grad`, in place; without their
        scale, which is that of `loss_grad` where it matters."""
        gradients: _Gradients | None = ctx.gradients
        assert gradients is not None, "backward through the same chunked loss twice"
        ctx.gradients = None
        factor = loss_grad if ctx.scale == 1.0 else loss_grad / ctx.scale
        scaled = [
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients.all, ctx.types, strict=True)
        ]
        return (*scaled, None, None, None, None, None)


@dataclass
class _Gradients:
    """What forward leaves for backward; None where no gradient is wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def all(self) -> tuple[torch.Tensor | None, ...]:
        """Of hidden states, weight and bias."""
        return self.hidden, self.weight, self.bias

    @classmethod
    def empty(
        cls, ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> _Gradients:
        """Space for the gradients that `ctx` says are wanted."""
        wanted = ctx.needs_input_grad
        fp32 = torch.float32
        with ledger.labelled(Kind.GRADIENTS):
            return cls(
                torch.empty_like(hidden) if wanted[0] else None,
                torch.zeros_like(weight, dtype=fp32) if wanted[1] else None,
                torch.zeros_like(bias, dtype=fp32) if bias is not None and wanted[2] else None,
            )


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: _Targets,
    piece: slice,
    divisor: float | torch.Tensor,
    gradients: _Gradients | None,
) -> torch.Tensor:
    """The summed loss of one chunk; its logits are gone when this returns."""
    logits = nn.functional.linear(hidden[piece], weight, bias).float()
    ledger.mark(logits, Kind.LOGITS)
    loss = _losses_to_probabilities(logits, targets)
    if gradients is None:
        return loss
    _to_logit_gradients(logits, targets, divisor)
    if gradients.bias is not None:
        gradients.bias += logits.sum(0)
    narrow = logits.to(weight.dtype)
    if gradients.hidden is not None:
        torch.mm(narrow, weight, out=gradients.hidden[piece])
    if gradients.weight is not None:
        _add_product(gradients.weight, narrow, hidden[piece])
    return loss


def _losses_to_probabilities(logits: torch.Tensor, targets: _Targets) -> torch.Tensor:
    """Sum of the losses of targets that are not ignored; `logits` become probabilities, scaled as
    the terms of the loss want them."""
    terms = targets.terms
    inside, index = targets.within(logits)
    highest = targets.vocabulary.highest(logits.amax(dim=1))
    logits -= highest.unsqueeze(1)
    at_target = torch.where(inside, logits.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)
    mean = terms.sum_of(logits)
    logits.exp_()
    sums = torch.stack([logits.sum(dim=1), at_target, mean])
    total, at_target, mean = targets.vocabulary.total(sums)
    logits /= total.unsqueeze(1)
    normaliser = total.log()
    losses = normaliser - at_target
    if terms != NO_TERMS:
        whole = normaliser + highest
        terms.scaled(logits, whole)
        losses += terms.added(whole, at_target, mean)
    return torch.where(targets.tokens == IGNORED, 0.0, losses).sum()


def _to_logit_gradients(
    probabilities: torch.Tensor, targets: _Targets, divisor: float | torch.Tensor
) -> None:
    """(probability - one-hot) / divisor in place, zero where the target is ignored."""
    targets.terms.subtract_targets(probabilities, *targets.within(probabilities))
    probabilities *= (targets.tokens != IGNORED).unsqueeze(1) / divisor


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left.T @ right`; without a temporary where the types agree."""
    if total.dtype is left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right


def _full_loss(
    terms: LossTerms,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of all logits, `[batch, seq, vocab]`, with its terms, by autograd."""
    targets, divisor = next_token_targets(labels, num_items_in_batch)
    flat = logits.float().reshape(-1, logits.shape[-1])
    normaliser = flat.logsumexp(dim=1)
    at_target = flat.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    losses = normaliser - at_target
    if (own := terms.trained()) != NO_TERMS:
        losses = losses + own.added(normaliser, at_target, own.sum_of(flat))
    return torch.where(targets == IGNORED, 0.0, losses).sum() / divisor


def _mark_logits(module: nn.Module, inputs: Any, logits: torch.Tensor) -> None:
    ledger.mark(logits, Kind.LOGITS)
