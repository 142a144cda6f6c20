"""One training step as other engines' users write it: modules of transformers, a plain loss.

What differs between their programs and matters for memory is an option of `OtherRun`: what is
computed again, how logits become a loss, where adapters sit. Values are fake, so an operation that
a compiler would fuse is stood for by one that keeps and makes the same tensors. Knows no engine:
how parameters, gradients and states are stored is `bill.other_engines`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tightfit import ledger
from tightfit.bill.other_engines import OtherLoss, OtherRun, Recompute
from tightfit.bill.table import Kind
from tightfit.dry_run.other_modules import share_dropouts

_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
_ATTENTION = "_scaled_dot_product"


def build(config: PretrainedConfig, run: OtherRun) -> PreTrainedModel:
    """The model in the type that its layers compute in, with its kernel of attention."""
    whole = run.autocast or run.widths.compute > 2
    dtype = torch.float32 if whole else torch.bfloat16
    config._attn_implementation = "sdpa" if run.flash_attention else "eager"
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError:  # a few architectures have no other kernel than that of all scores
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def adapt(model: PreTrainedModel, run: OtherRun) -> nn.Module:
    """The model with the run's adapters, or the model itself."""
    if run.adapter is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=run.adapter.rank,
        lora_alpha=run.adapter.alpha,  # type: ignore[arg-type]  # peft divides, a float works
        lora_dropout=run.adapter.dropout,
        target_modules=list(run.adapter.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft 0.21 asks transformers under a name that will go
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        with _made_in(torch.float32 if run.adapter_width > 2 else torch.bfloat16):
            adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
    if run.fused_qkv:
        share_dropouts(adapted)
    if run.train_embeddings:  # peft trains copies; what is counted beside them is the same
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(True)
    return adapted


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are of `dtype`; fake ones cannot be cast afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def recompute_layers(layers: nn.ModuleList, how: Recompute) -> None:
    """Make the layers keep only what `how` says."""
    for index, layer in enumerate(layers):
        if how is Recompute.NONE or (how is Recompute.ALTERNATE and index % 2):
            continue
        options: dict[str, Any] = {"use_reentrant": False}
        if how is Recompute.SELECTIVE:
            options["context_fn"] = _contexts
        layer.forward = partial(checkpoint, layer.forward, **options)


def _contexts() -> Any:
    """Keep attention and every other matrix product, the first of each two."""
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        else:
            kept = name.startswith(_ATTENTION)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def forward(model: PreTrainedModel, run: OtherRun) -> tuple[torch.Tensor, Any]:
    """The loss of one micro-batch, and what the caller still refers to in backward."""
    shape = (run.micro_batch_size, run.sequence_length // run.context_parallel)
    with ledger.labelled(Kind.BUFFERS):
        input_ids, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16) if run.autocast else nullcontext():
        hidden = model.get_decoder()(input_ids=input_ids, use_cache=False)[0]
        head = model.get_output_embeddings()
        loss, logits = _loss(hidden, head, labels.flatten(), run.loss)
    return loss, logits if run.loss.keep_logits else None


def _loss(
    hidden: torch.Tensor, head: Callable[..., Any], labels: torch.Tensor, how: OtherLoss
) -> tuple[torch.Tensor, Any]:
    """Cross-entropy of `hidden` `[batch, seq, hidden]`, and the logits."""
    if how.recompute_tokens:
        return _in_pieces(hidden.flatten(0, 1), head, labels, how), None
    logits = [head(part) for part in hidden.chunk(how.head_chunks, dim=1)]
    if how.shift_copy:
        logits = [(part.float() if how.upcast else part) for part in logits]
        shifted = [part[:, :-1].contiguous().flatten(0, 1) for part in logits]
    else:
        shifted = [part.flatten(0, 1) for part in logits]
    losses = [_cross_entropy(part, labels[: len(part)], how) for part in shifted]
    return torch.stack(losses).sum(), logits


def _in_pieces(
    hidden: torch.Tensor, head: Callable[..., Any], labels: torch.Tensor, how: OtherLoss
) -> torch.Tensor:
    """A few positions at a time, whose logits are made again in backward."""
    assert how.recompute_tokens is not None

    def piece(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(head(part), targets, how)

    pairs = zip(hidden.split(how.recompute_tokens), labels.split(how.recompute_tokens), strict=True)
    losses = [checkpoint(piece, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, how: OtherLoss) -> torch.Tensor:
    if how.fused or how.offloaded:
        loss: torch.Tensor = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits, how.offloaded
        )
        return loss
    return cross_entropy(logits.float() if how.upcast else logits, labels, reduction="sum")


class _FusedCrossEntropy(torch.autograd.Function):
    """Keeps the logits, or fetches them again; makes their gradient in their own type.

    The values mean nothing.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, offloaded: bool) -> torch.Tensor:
        """A scalar."""
        context.shape = logits.shape
        context.save_for_backward(logits.new_empty(0) if offloaded else logits)
        return logits.new_zeros(len(logits), dtype=torch.float32).sum()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        """Of the logits."""
        (logits,) = context.saved_tensors
        logits = logits if logits.numel() else logits.new_empty(context.shape)
        return torch.empty_like(logits), None
