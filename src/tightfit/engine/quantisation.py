"""A frozen base of 4 bits (NF4) for adapters: QLoRA, https://arxiv.org/abs/2305.14314.

The numbers are bitsandbytes', from its kernels; the module is our own, since all that it keeps are
plain uint8 parameters: they can be sharded at any byte, moved and saved like others, and no mixed
precision casts them. Weights are dequantised to the input's type when they are needed, in backward
once more. Knows nothing of adapters; `tightfit.bill.quantised` has the bytes.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tightfit import ledger
from tightfit.bill.quantised import SCALES_PER_GROUP, check_quantisation, quantised_shapes
from tightfit.bill.table import Kind
from tightfit.engine.regions import Region, whole
from tightfit.engine.unloaded import Fill
from tightfit.errors import UnsupportedError
from tightfit.policies import QuantisationPolicy, Tier

# Weights quantised at a time: on the CPU the kernel itself takes about ten bytes for each.
_WEIGHTS_AT_A_TIME = 2**22
_PARTS = ("weight", "scales", "group_scales")
# Classes derived from nn.Linear with a forward of their own that computes the same.
_LINEAR_BY_ANOTHER_NAME = ("FalconLinear",)


def import_library() -> None:
    """Import bitsandbytes, which makes tensors of its own: do it where nothing is counted or faked.

    Raises:
        UnsupportedError: it is not installed.
    """
    # It warns of a package that only its kernels for inference would use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401  # takes a second, only 4 bits need it
    except ImportError as error:
        raise UnsupportedError(
            f"quantization_bit: 4 needs bitsandbytes, which cannot be imported ({error}); "
            "install it (pip install 'tightfit[qlora]') or leave quantization_bit out"
        ) from None
    _scale_values()


def apply_quantisation(
    model: PreTrainedModel, policy: QuantisationPolicy | None, device: torch.device | None = None
) -> None:
    """Quantise every linear layer of the model but its output layer, in place and for good.

    Each weight is freed before the next is quantised; layers on the meta device become quantised
    ones there, which `quantising` fills. Embeddings and norms stay what they are, and
    so do the experts of mixture models, which transformers keeps in three dimensions and not in
    linear layers. Do it before adapters are added.

    Args:
        device: where the model computes; where it is, when None.

    Raises:
        UnsupportedError: bitsandbytes is missing, the policy has no kernels, a weight cannot be
            packed in pairs, or there is nothing to quantise.
    """
    if policy is None:
        return
    check_quantisation(policy)
    import_library()
    places = linear_layers(model)
    if not places:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear layers to quantise, or is quantised already; "
            "leave quantization_bit out"
        )
    scale_values = torch.tensor(_scale_values(), device=device or model.device)
    ledger.mark(scale_values, Kind.BUFFERS)
    for parent, name in places:
        setattr(parent, name, _quantised(getattr(parent, name), policy, scale_values))


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether `apply_quantisation` has been there."""
    return any(isinstance(module, QuantisedLinear) for module in model.modules())


def linear_layers(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Where the layers hang that are to be quantised: their parents, and their names there.

    They are all linear layers but the output layer, before adapters are added.

    Raises:
        UnsupportedError: a weight cannot be packed in pairs.
    """
    head = model.get_output_embeddings()
    places = []
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if child is head or not _is_linear(child):
                continue
            rows, columns = child.weight.shape
            if rows * columns % 2:
                raise UnsupportedError(
                    f"{path}.{name} has {rows} x {columns} weights, an odd number, which cannot "
                    "be packed in pairs; leave quantization_bit out"
                )
            places.append((parent, name))
    return places


class QuantisedLinear(nn.Linear):
    """`nn.Linear` with a frozen weight `[out, in]` of 4 bits; peft takes it for a linear layer.

    Attributes:
        weight: uint8 `[out * in / 2]`, two weights to a byte, row after row.
        scales: uint8, one for each block of weights: `[blocks]` codes, or `[blocks, 4]`, which are
            the bytes of fp32 numbers.
        group_scales: uint8 `[groups + 1, 4]`, the bytes of fp32 numbers: a scale for each 256
            codes, then the offset of all; None unless doubly quantised.
        scale_values: fp32 `[256]`, the numbers that codes stand for; one for all layers.
        is_transposed: whether files have the weight as `[in, out]`.
        whole_shape, whole_policy: what it was made of.
        kept: the rows and columns of it that are left, where some are not.
    """

    weight: nn.Parameter
    scales: nn.Parameter
    group_scales: nn.Parameter | None
    scale_values: torch.Tensor
    is_transposed = False
    kept: tuple[slice, slice] | None = None

    def __init__(
        self,
        weight: torch.Tensor,
        bias: nn.Parameter | None,
        policy: QuantisationPolicy,
        scale_values: torch.Tensor,
    ) -> None:
        """Quantise `weight`, `[out, in]` of any strides, and freeze `bias`."""
        nn.Module.__init__(self)  # not Linear's, which makes a whole weight
        self.out_features, self.in_features = weight.shape
        self.whole_shape = (self.out_features, self.in_features)
        self.policy = self.whole_policy = policy
        parts = quantised_parts(weight, policy, scale_values)
        for name in _PARTS:
            self.register_parameter(name, _frozen(parts[name]) if name in parts else None)
        self.register_parameter("bias", bias)
        self.requires_grad_(False)
        self.register_buffer("scale_values", scale_values, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's name
        """`[..., in]` to `[..., out]` in the input's type."""
        output: torch.Tensor = _FrozenLinear.apply(  # type: ignore[no-untyped-call]
            input, self, torch.is_grad_enabled()
        )
        return output

    @torch.no_grad()
    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight `[out, in]` in `dtype`."""
        # As one row: bitsandbytes' CPU kernel is wrong where blocks run from a row into the next.
        shape = (self.out_features * self.in_features,)
        flat: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            self.weight, self._dequantised_scales(), self.policy.block, "nf4", shape, dtype
        )
        return flat.view(self.out_features, self.in_features)

    @torch.no_grad()
    def keep(self, rows: slice, columns: slice) -> None:
        """Keep a part of the weight and forget the rest; `columns` begin and end with blocks.

        Scales are fp32 afterwards, which they were made from: what is kept is the same to the bit,
        and a part would cut through groups of scales.
        """
        self.kept = (rows, columns)
        block = self.policy.block
        scales = self._dequantised_scales().view(self.out_features, -1)
        scales = scales[rows, columns.start // block : columns.stop // block]
        packed = self.weight.view(self.out_features, -1)
        packed = packed[rows, columns.start // 2 : columns.stop // 2]
        self.out_features, self.in_features = packed.shape[0], 2 * packed.shape[1]
        own = torch.contiguous_format
        self.weight = _frozen(packed.clone(memory_format=own).view(-1))
        self.scales = _frozen(scales.clone(memory_format=own).view(torch.uint8).view(-1, 4))
        self.register_parameter("group_scales", None)
        self.policy = replace(self.policy, double=False)
        for parameter in self.quantised_parameters():
            ledger.mark(parameter, Kind.PARAMETERS)

    def quantised_parameters(self) -> list[nn.Parameter]:
        """What the weight is kept in: all parameters but the bias."""
        return [parameter for parameter in self.parameters() if parameter is not self.bias]

    def _dequantised_scales(self) -> torch.Tensor:
        """fp32 `[blocks]`."""
        if self.group_scales is None:
            return self.scales.view(torch.float32).view(-1)
        group_scales = self.group_scales.view(torch.float32).view(-1)
        scales: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
            self.scales,
            group_scales[:-1],
            self.scale_values.to(self.scales.device),  # of layers on meta, nowhere else
            SCALES_PER_GROUP,
            torch.float32,
        )
        return scales.add_(group_scales[-1])


class _FrozenLinear(torch.autograd.Function):
    """Linear layer that keeps nothing for backward: the layer dequantises its weight again.

    Backward asks the layer and not saved tensors, so that a layer whose parameters come and go
    (shards, offloading) uses those that are there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        layer: QuantisedLinear,
        recording: bool,
    ) -> torch.Tensor:
        """`recording` is whether the caller had gradients on, by which the ledger tells
        activations, such as the output, from temporaries, such as the dequantised weight."""
        ctx.layer = layer
        weight = layer.dequantised(inputs.dtype)
        with torch.set_grad_enabled(recording):
            return nn.functional.linear(inputs.detach(), weight, layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The input's gradient; the layer is frozen."""
        return gradient @ ctx.layer.dequantised(gradient.dtype), None, None


@functools.cache
def _scale_values() -> tuple[float, ...]:
    """The 256 numbers of bitsandbytes' signed dynamic type (https://arxiv.org/abs/1511.04561)."""
    from bitsandbytes.functional import create_dynamic_map

    with _disable_current_modes():
        values: list[float] = create_dynamic_map().tolist()
    return tuple(values)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether it is a linear layer not yet quantised; routers derived from `nn.Linear` are none."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    return isinstance(module, nn.Linear) and type(module).__name__ in _LINEAR_BY_ANOTHER_NAME


def _quantised(
    module: nn.Linear | Conv1D, policy: QuantisationPolicy, scale_values: torch.Tensor
) -> QuantisedLinear:
    """What takes the place of a linear layer, or of GPT-2's, whose weight is `[in, out]`."""
    weight = module.weight.detach()
    rows_first = weight.T if isinstance(module, Conv1D) else weight
    layer = QuantisedLinear(rows_first, module.bias, policy, scale_values)
    layer.is_transposed = isinstance(module, Conv1D)
    for parameter in layer.quantised_parameters():
        ledger.mark(parameter, Kind.PARAMETERS)
    return layer.train(module.training)


def quantised_parts(
    weight: torch.Tensor, policy: QuantisationPolicy, scale_values: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What `QuantisedLinear` keeps of a weight `[out, in]`, by the names that it has there."""
    packed, scales = _quantise(weight, policy)
    if not policy.double:
        return {"weight": packed, "scales": scales.view(torch.uint8).view(-1, 4)}
    codes, group_scales = _quantise_scales(scales, scale_values.to(weight.device))
    return {"weight": packed, "scales": codes, "group_scales": group_scales}


def dequantised_again(weight: torch.Tensor, policy: QuantisationPolicy) -> torch.Tensor:
    """What a base of few bits has in the place of a weight `[out, in]`: fp32."""
    import_library()
    return QuantisedLinear(weight, None, policy, torch.tensor(_scale_values())).dequantised(
        torch.float32
    )


def quantising(fill: Fill, model: PreTrainedModel, dtype: torch.dtype) -> Fill:
    """Fills a model with quantised layers by what fills the model that it was.

    A weight is read whole and quantised where its layer computes, by every rank that keeps a part.

    Args:
        dtype: weights are read in.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantisedLinear)}
    made: dict[str, torch.Tensor] = {}  # of the layer that is being filled

    def fill_quantised(name: str, values: torch.Tensor, region: Region) -> None:
        path, _, part = name.rpartition(".")
        layer = layers.get(path)
        if layer is None or part == "bias":
            made.clear()
            fill(name, values, region)
            return
        if name not in made:
            made.clear()
            shape = layer.whole_shape
            with ledger.labelled(Kind.TRANSFER, Tier.HOST):
                weight = torch.empty(shape[::-1] if layer.is_transposed else shape, dtype=dtype)
            fill(f"{path}.weight", weight, whole(weight))
            with ledger.labelled(Kind.TEMPORARIES):
                on_device = weight.to(layer.scale_values.device)
                rows_first = on_device.T if layer.is_transposed else on_device
                same = QuantisedLinear(rows_first, None, layer.whole_policy, layer.scale_values)
                if layer.kept is not None:
                    same.keep(*layer.kept)
            made.update({f"{path}.{key}": p.detach() for key, p in same.named_parameters()})
        values.copy_(made[name][region])

    return fill_quantised


def _quantise(
    weight: torch.Tensor, policy: QuantisationPolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed weights, uint8 `[out * in / 2]`, and the scales of their blocks, fp32."""
    rows, columns = weight.shape
    packed_shape, scales_shape = quantised_shapes((rows, columns), policy)[:2]
    packed = torch.empty(packed_shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(scales_shape[0], dtype=torch.float32, device=weight.device)
    # Whole blocks of rows, so that pieces begin where blocks do.
    step = max(_WEIGHTS_AT_A_TIME // columns // policy.block, 1) * policy.block
    for start in range(0, rows, step):
        piece = weight[start : start + step].reshape(-1)
        codes, maxima = torch.ops.bitsandbytes.quantize_4bit.default(
            piece, policy.block, "nf4", torch.uint8
        )
        packed[start * columns // 2 :][: codes.numel()] = codes.view(-1)
        scales[start * columns // policy.block :][: maxima.numel()] = maxima
    return packed, scales


def _quantise_scales(
    scales: torch.Tensor, scale_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 `[blocks]`, and scales of groups with the offset, uint8 `[groups + 1, 4]`."""
    offset = scales.mean()
    codes, group_scales = torch.ops.bitsandbytes.quantize_blockwise.default(
        scales - offset, scale_values, SCALES_PER_GROUP
    )
    numbers = torch.cat([group_scales, offset.view(1)])
    return codes, numbers.view(torch.uint8).view(-1, 4)


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
