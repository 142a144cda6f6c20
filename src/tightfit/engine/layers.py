"""Where a decoder's repeated layers are."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's repeated layers."""
    depth = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")
