"""A dry run on the CPU that counts what an NVIDIA card's kernels allocate.

Fake tensors are CPU tensors, so torch runs its CPU kernels. Where a card's take other memory, by
more than a hundredth of a step, the call is answered here instead: attention
(`card_attention.py`), dropout, the gradient of an embedding. Enter it inside the ledger, whose
counting then sees what is allocated here.

The same on both, or too small: norms (a card keeps LayerNorm's two statistics in fp32, here in the
type of the input: 4 bytes per token), softmax and cross-entropy, fused AdamW (no temporaries),
`_foreach_norm` (4 bytes per 65,536 elements), reductions, products (cuBLAS' workspace is in
`bill/runtime.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from tightfit.bill.runtime import Capability
from tightfit.dry_run.card_attention import card_attention, flash_attention
from tightfit.engine.attention import check_flash_capability, flash_stand_in

# As they were before any of them was replaced.
_plain_dropout = functional.dropout
_plain_embedding = functional.embedding

_STAND_IN = "tightfit_package_stand_in"
_FEW_INDICES = 3072
_ROWS_PER_SEGMENT = 10
_INDEX_TENSORS = 7


@contextmanager
def card_kernels(capability: Capability) -> Iterator[None]:
    """Operations inside allocate as on a card of this compute capability, such as `(8, 6)`.

    `attention: flash` is priced whether or not the package is installed.

    Raises:
        UnsupportedError: out of a forward, where `flash` is to run on a card too old for it.
    """
    AttentionInterface.register(_STAND_IN, partial(_flash_package, capability))
    AttentionMaskInterface.register(_STAND_IN, flash_attention_mask)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "scaled_dot_product_attention": partial(card_attention, capability),
        "dropout": _dropout,
        "embedding": _embedding,
    }
    with flash_stand_in(_STAND_IN), _replaced(functions):
        yield


@contextmanager
def _replaced(functions: dict[str, Callable[..., torch.Tensor]]) -> Iterator[None]:
    """Put functions into torch.nn.functional. A mode would not do: `Tensor.backward` suspends it,
    and a checkpointed layer runs its forward again in there."""
    originals = {name: getattr(functional, name) for name in functions}
    for name, function in functions.items():
        setattr(functional, name, _for_plain_tensors(function, originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def _for_plain_tensors(
    function: Callable[..., torch.Tensor], original: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """`original` for DTensors, which torch takes apart before it comes to kernels."""

    @wraps(original)
    def either(*args: Any, **kwargs: Any) -> torch.Tensor:
        if any(isinstance(argument, DTensor) for argument in args):
            return original(*args, **kwargs)
        return function(*args, **kwargs)

    return either


def _flash_package(
    capability: Capability,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """flash-attn's function as transformers calls it; windows and caps are the kernel's own."""
    check_flash_capability(capability)
    return flash_attention(query, key, value).transpose(1, 2), None


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """On a card dropout keeps a mask of one byte per element (`native_dropout`); the CPU's keeps
    one of the tensor's type (aten/src/ATen/native/Dropout.cpp)."""
    if inplace or not training or p in (0.0, 1.0):
        return _plain_dropout(tensor, p, training, inplace)
    return torch.native_dropout(tensor, p, True)[0]


def _embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    special = sparse or max_norm is not None or not weight.requires_grad
    if special or not torch.is_grad_enabled() or indices.numel() <= _FEW_INDICES:
        return _plain_embedding(
            indices, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    rows: torch.Tensor = _Embedding.apply(indices, weight)  # type: ignore[no-untyped-call]
    return rows


class _Embedding(torch.autograd.Function):
    """A lookup whose gradient sorts the indices and sums the rows of each in fp32."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of `weight`, `[*indices.shape, width]`."""
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        with torch.enable_grad():  # for the ledger: it may be kept
            return _plain_embedding(indices, weight.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        """aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu: sums of at most
        ten rows each, as many as there could be; bf16 and fp16 add up in fp32."""
        (indices,) = ctx.saved_tensors
        count = indices.numel()
        segments = min(count, ctx.rows)
        partial = count // _ROWS_PER_SEGMENT + segments
        result = gradient.new_empty(ctx.rows, gradient.shape[-1])
        workspace = (
            indices.new_empty(_INDEX_TENSORS, count),
            gradient.new_empty(partial, gradient.shape[-1], dtype=torch.float32),
        )
        del workspace
        return None, result
