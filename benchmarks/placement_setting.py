"""The model that placement.py trains and what it is trained on; the same for all contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import sleep
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tightfit.engine.layers import decoder_layers


@dataclass(frozen=True)
class Setting:
    """A model and what it is trained on.

    Attributes:
        waits_seconds: what each decoder layer waits in forward and in backward, as the host does
            while an accelerator computes; it has only a few tokens to compute itself then.
        share: of the benchmark's time.
        also_quick: whether a quick run has it too.
    """

    name: str
    ranks: int
    hidden_size: int = 512
    intermediate_size: int = 1376
    layers: int = 8
    vocabulary: int = 8192
    sequences: int = 2
    length: int = 128
    waits_seconds: tuple[float, float] = (0.0, 0.0)
    share: float = 1.0
    also_quick: bool = True


def make_model(setting: Setting) -> PreTrainedModel:
    """The same weights for everybody."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden_size,
        intermediate_size=setting.intermediate_size,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden_size // 64,
        num_key_value_heads=setting.hidden_size // 64,
        max_position_embeddings=setting.length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if any(setting.waits_seconds):
        for layer in decoder_layers(model):
            layer.forward = _waiting(layer.forward, setting.waits_seconds)
    model.train()
    return model


def batch(setting: Setting, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels `[sequences, length]`, the same for everybody."""
    generator = torch.Generator().manual_seed(1 + rank + setting.ranks * (step % 4))
    shape = (setting.sequences, setting.length)
    input_ids = torch.randint(setting.vocabulary, shape, generator=generator)
    return input_ids, input_ids.clone()


class _Wait(torch.autograd.Function):
    """The identity, some time later in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: tuple[float, float]) -> torch.Tensor:
        ctx.seconds = seconds[1]
        sleep(seconds[0])
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(ctx.seconds)
        return gradient, None


def _waiting(plain: Callable[..., torch.Tensor], seconds: tuple[float, float]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        values: torch.Tensor = _Wait.apply(plain(*args, **kwargs), seconds)  # type: ignore[no-untyped-call]
        return values

    return forward
