"""What attention allocates on an NVIDIA card, by the kernel that will run there.

torch chooses the kernel for each call (`select_sdp_backend` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). The fused ones never hold the scores; what
they keep and what they take inside backward is written down here from the sources named. cuDNN's,
which torch prefers on Hopper and Blackwell, is taken to allocate what flash does: an fp32
gradient of the queries and, for groups, whole gradients of keys and values.
Works on tensors of shapes without values; knows nothing of models.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit import ledger
from tightfit.bill.runtime import Capability
from tightfit.bill.table import Kind

_plain_attention = functional.scaled_dot_product_attention  # before anybody replaces it

_HALF = (torch.bfloat16, torch.float16)
_FP32 = torch.float32
_FLASH_FROM: Capability = (8, 0)
_FLASH_WIDEST = 256
_FLASH_WIDTH = 8  # heads are padded to a multiple
# Cards whose shared memory is too small for backward of heads this wide, sdp_utils.cpp
# (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120).
_SMALL_CARDS: tuple[Capability, ...] = ((8, 6), (8, 9), (12, 0), (12, 1))
_MASK_ALIGNMENT = 16  # elements, preprocess_mask in transformers/attention.cpp
# pytorch#191085: before, one key head for several query heads fell back to the math kernel.
_EFFICIENT_GROUPS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)


class Path(StrEnum):
    """The kernels between which torch chooses."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    MATH = "math"  # all scores at once, in fp32


def path_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    capability: Capability,
    masked: bool,
    dropout: float = 0.0,
    causal: bool = False,
) -> Path:
    """The kernel that torch takes on a card of `capability`; tensors are `[b, heads, s, d]`."""
    training = torch.is_grad_enabled() and query.requires_grad
    if not masked and _flash_can(query, key, value, capability, training, dropout, causal):
        return Path.FLASH
    return Path.EFFICIENT if _efficient_can(query, key, value, capability) else Path.MATH


def _flash_can(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    capability: Capability,
    training: bool,
    dropout: float,
    causal: bool,
) -> bool:
    width = query.shape[-1]
    if capability < _FLASH_FROM or query.dtype not in _HALF:
        return False
    if width > _FLASH_WIDEST or not width == key.shape[-1] == value.shape[-1]:
        return False
    if causal and query.shape[-2] != key.shape[-2]:
        return False
    too_wide = 192 < width <= 224 or (width > 224 and dropout > 0)
    return not (training and too_wide and capability in _SMALL_CARDS)


def _efficient_can(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: Capability
) -> bool:
    if query.dtype is torch.bfloat16 and capability < _FLASH_FROM:
        return False
    if query.dtype not in (*_HALF, _FP32):
        return False
    alignment = 8 if query.dtype in _HALF else 4 if capability >= _FLASH_FROM else 1
    if any(width % alignment for width in (query.shape[-1], value.shape[-1])):
        return False
    return query.shape[1] == key.shape[1] or _EFFICIENT_GROUPS


def card_attention(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as far as memory goes, `[b, heads, s, d]`."""
    path = path_of(
        query,
        key,
        value,
        capability=capability,
        masked=attn_mask is not None,
        dropout=dropout_p,
        causal=is_causal,
    )
    if path is Path.MATH:
        with sdpa_kernel(SDPBackend.MATH):
            return _plain_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
    if path is Path.FLASH:
        return flash_attention(query, key, value)
    mask = None if attn_mask is None else _additive(attn_mask, query, key)
    return _fused(query, key, value, mask, Path.EFFICIENT)


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The flash kernel, torch's own or the package's, which allocate alike; `[b, heads, s, d]`."""
    width = query.shape[-1]
    if width % _FLASH_WIDTH:
        query, key, value = (
            functional.pad(tensor, (0, -width % _FLASH_WIDTH)) for tensor in (query, key, value)
        )
    return _fused(query, key, value, None, Path.FLASH)[..., :width]


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    path: Path,
) -> torch.Tensor:
    out: torch.Tensor = _Fused.apply(query, key, value, mask, path)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    """Keeps queries, keys, values, mask, output and the logarithms of the scores' sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        path: Path,
    ) -> torch.Tensor:
        """The output, laid out `[b, s, heads, d]` and seen as `[b, heads, s, d]`."""
        batch, heads, length, _ = query.shape
        # kAlignLSE of mem_eff_attention/kernel_forward.h.
        rows = length if path is Path.FLASH else _round_up(length, 32)
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):  # for the ledger: they are kept
            out = query.new_empty(batch, length, heads, value.shape[-1])
            logarithms = query.new_empty(batch, heads, rows, dtype=_FP32)
        out = out.transpose(1, 2)
        with ledger.labelled(Kind.TEMPORARIES):
            accumulator = _forward_accumulator(query, value, path)
        del accumulator
        ctx.path = path
        ctx.save_for_backward(query, key, value, mask, out, logarithms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys and values; what the kernel takes besides lives till then."""
        query, key, value, *_ = ctx.saved_tensors
        contiguous = out_gradient.transpose(1, 2).contiguous()
        gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        workspace = _backward_workspace(query, key, value, ctx.path)
        del workspace, contiguous
        return (*gradients, None, None)


def _forward_accumulator(
    query: torch.Tensor, value: torch.Tensor, path: Path
) -> torch.Tensor | None:
    """mem_eff_attention/kernel_forward.h: 16-bit outputs of heads wider than 128 add up in fp32."""
    if path is Path.FLASH or value.shape[-1] <= 128 or query.dtype is _FP32:
        return None
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=_FP32)


def _backward_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, path: Path
) -> list[torch.Tensor]:
    if path is Path.FLASH:
        workspace = _flash_workspace(query)
    else:
        workspace = _efficient_workspace(query, key, value)
    if query.shape[1] != key.shape[1]:  # groups: whole gradients, summed over each afterwards
        workspace += [
            tensor.new_empty(tensor.shape[0], query.shape[1], *tensor.shape[2:])
            for tensor in (key, value)
        ]
    return workspace


def _flash_workspace(query: torch.Tensor) -> list[torch.Tensor]:
    """mha_bwd in flash_attn/flash_api.cpp: `softmax_d` and `dq_accum`."""
    batch, heads, length, width = query.shape
    rows = _round_up(length, 128)
    columns = _round_up(width, 32 if width <= 128 else 64)
    return [
        query.new_empty(batch, heads, rows, dtype=_FP32),
        query.new_empty(batch, rows, heads, columns, dtype=_FP32),
    ]


def _efficient_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    """`delta`, and `workspace_size` in mem_eff_attention/kernel_backward.h: a staging area for the
    gradient of the queries and, where heads are wide, for those of the split keys and values."""
    batch, heads, length, width = query.shape
    sums = query.new_empty(batch, heads, length, dtype=_FP32)
    if query.dtype is _FP32:  # delta is not the kernel's own then, but a product and its sum
        product = query.new_empty(value.shape[0], heads, length, value.shape[-1])
        del product
    elements = _round_up(length, 128) * _round_up(width, 64)
    if query.dtype in _HALF and width > 64:
        splits = max(1, min(-(-key.shape[2] // 64), 200 // (batch * heads)))
        elements += splits * 64 * (_round_up(width, 128) + _round_up(value.shape[-1], 128))
    return [sums, query.new_empty(batch * heads * elements, dtype=_FP32)]


def _additive(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the kernel reads it: added to the scores, of their type, rows aligned."""
    if mask.dtype is torch.bool:
        nothing = query.new_zeros(())
        mask = torch.where(mask, nothing, query.new_full((), float("-inf")))
    length = mask.shape[-1]
    if any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        mask = functional.pad(mask, (0, -length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(*query.shape[:3], key.shape[2])


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
