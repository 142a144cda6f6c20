"""Modules of transformers made to keep and take what other implementations of them do.

Values are fake, so a fused kernel is stood for by a function that keeps and makes tensors of the
same sizes. Knows layers and their parts by the names that transformers' decoders share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.bill.other_engines import OtherRun

_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_MLP_OUTPUTS = ("down_proj", "fc2", "dense_4h_to_h")
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")


def imitate(layers: nn.ModuleList, run: OtherRun) -> None:
    """Make the layers keep what other implementations of them keep."""
    for name, module in layers.named_modules():
        path = set(name.split("."))
        is_product = isinstance(module, nn.Linear) and not path & {"lora_A", "lora_B"}
        is_extra = run.fused_qkv and path & {"k_proj", "v_proj"}  # one product with the queries'
        if run.keeps_inputs and is_product and not is_extra:
            module.register_forward_hook(_keep_copy if run.keeps_inputs > 2 else _keep_input)
        elif run.keeps_mlp_product and name.rpartition(".")[2] in _MLP_OUTPUTS:
            module.register_forward_hook(_keep_input)
        if run.keeps_outputs and (isinstance(module, nn.Linear) or _is_norm(module)):
            module.register_forward_hook(_keep_output)
        parts: dict[str, Any] = dict(module.named_children())
        if run.fused_qkv and parts.keys() >= set(_ATTENTION_INPUTS):
            others = parts["q_proj"].out_features + parts["k_proj"].out_features
            parts["v_proj"].register_forward_hook(partial(_as_part, others))


def compile_layers(layers: nn.ModuleList) -> None:
    """Make norms and gates of the layers take and keep what a compiler's fused kernels do."""
    for module in layers.modules():
        parts: dict[str, Any] = dict(module.named_children())
        weight = getattr(module, "weight", None)
        if _is_norm(module) and isinstance(weight, torch.Tensor):
            module.forward = partial(_fused_norm, weight)
        if parts.keys() >= set(_GATED_MLP):
            module.forward = partial(_fused_mlp, *(parts[name] for name in _GATED_MLP))


def share_dropouts(adapted: nn.Module) -> None:
    """Give the adapters of a layer's query, key and value one dropout, which draws once."""
    for module in adapted.modules():
        children: dict[str, Any] = dict(module.named_children())
        readers = [
            children[name].lora_dropout
            for name in _ATTENTION_INPUTS
            if hasattr(children.get(name), "lora_dropout")
        ]
        if len(readers) > 1:
            shared = _Shared(readers[0]["default"], len(readers))
            for dropouts in readers:
                dropouts["default"] = shared


def _fused_norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Fused.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def _fused_mlp(gate: Any, up: Any, down: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = down(_Fused.apply(gate(x), up(x)))  # type: ignore[no-untyped-call]
    return result


class _Fused(torch.autograd.Function):
    """One kernel: keeps its arguments, makes one result and the gradients; values mean nothing."""

    @staticmethod
    def forward(context: Any, *arguments: torch.Tensor) -> torch.Tensor:
        """A tensor like the first of them."""
        context.save_for_backward(*arguments)
        return torch.empty_like(arguments[0])

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        """Of the arguments that need one."""
        needed = zip(context.saved_tensors, context.needs_input_grad, strict=True)
        return tuple(torch.empty_like(argument) if needs else None for argument, needs in needed)


def _keep_input(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
    return _keep(output, inputs[0])


def _keep_copy(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
    return _keep(output, inputs[0].detach().float())


def _keep(output: torch.Tensor, kept: torch.Tensor) -> Any:
    if not output.requires_grad:
        return output
    return _Kept.apply(output, kept)  # type: ignore[no-untyped-call]


def _keep_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
    return _keep(output, output.detach())


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


class _Kept(torch.autograd.Function):
    """Passes its first argument through and keeps the second for backward."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The first argument itself."""
        context.save_for_backward(kept)
        context.mark_dirty(output)
        return output

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Any, None]:
        """Passes through."""
        return gradients[0], None


def _as_part(others: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """`output` as the end of a tensor that is `others` columns wider."""
    rest = output.new_empty(*output.shape[:-1], others)
    return torch.cat((rest, output), dim=-1)[..., others:]


class _Shared(nn.Module):
    """One dropout for several adapters that read the same input."""

    def __init__(self, dropout: nn.Module, readers: int) -> None:
        super().__init__()
        self.dropout, self.readers, self.waiting = dropout, readers, 0
        self.result: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The dropout of `x`, the same tensor for every reader in turn."""
        if self.result is None:
            self.result, self.waiting = self.dropout(x), self.readers
        result, self.waiting = self.result, self.waiting - 1
        if not self.waiting:
            self.result = None
        return result
