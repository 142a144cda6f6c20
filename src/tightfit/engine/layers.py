"""Where a decoder's repeated layers are, and what stands where another rank has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class Absent(nn.Module):
    """Stands for a module that another stage of a pipeline has: what it is given goes through."""

    def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """`hidden_states`."""
        return hidden_states


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's repeated layers, in which those of other stages are `Absent`."""
    depth = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")


def own_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Those of the layers that this rank has."""
    return [layer for layer in decoder_layers(model) if not isinstance(layer, Absent)]
