"""DoRA (https://arxiv.org/abs/2402.09353): adapters with a trained magnitude for each output.

peft computes it. A magnitude begins as the norm of what the layer's weight gives that output, and
peft takes it when it makes the layer; here weights are loaded later, so it is taken then. Every
forward needs all of the weight beside what the layer computes: so far of a base that is whole on
the device, in 16 or 32 bits. Knows nothing of LoRA itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tightfit.errors import UnsupportedError
from tightfit.policies import Policies, Tier


def check_dora(policies: Policies) -> None:
    """See that nothing is chosen beside DoRA that it has not been proved with.

    Raises:
        UnsupportedError: naming what to leave.
    """
    if policies.adapter is None or not policies.adapter.dora:
        return
    sharding = policies.sharding
    reasons = {
        "quantization_bit (leave it out, or use_dora)": policies.quantisation is not None,
        "tensor_parallel_size (take 1)": sharding.tensor_parallel > 1,
        f"zero_stage {sharding.zero_stage} (take 0)": sharding.shards > 1,
        "offload_param (take none; states and activations may leave)": (
            policies.placement.parameters is not Tier.DEVICE
        ),
    }
    found = [words for words, applies in reasons.items() if applies]
    if found:
        raise UnsupportedError(
            "use_dora needs each layer's weight whole, on the device and in 16 or 32 bits, which "
            f"rules out {', '.join(found)}; LoRA (use_dora: false) does without"
        )


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, peft makes magnitudes without looking at weights, which are not loaded yet."""
    from peft.tuners.lora.dora import DoraLinearLayer

    plain = DoraLinearLayer.update_layer

    def make(self: Any, *, lora_B: torch.Tensor, **unused: Any) -> None:  # noqa: N803  # peft's
        self.weight = nn.Parameter(torch.ones(lora_B.shape[0], device=lora_B.device))

    DoraLinearLayer.update_layer = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        DoraLinearLayer.update_layer = plain  # type: ignore[method-assign]


@torch.no_grad()
def take_magnitudes(root: nn.Module) -> None:
    """Set the magnitudes of all layers to the norms of their weights, which are loaded by now."""
    for module in root.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            layer: Any = module
            outputs = 0 if layer.fan_in_fan_out else 1  # GPT-2's weights are `[in, out]`
            norms = torch.linalg.vector_norm(
                layer.base_layer.weight, dim=outputs, dtype=torch.float32
            )
            magnitude.weight.copy_(norms)
