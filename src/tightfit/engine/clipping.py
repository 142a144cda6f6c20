"""The norm of all gradients, wherever they are, and the factor that clips them.

Both are those of `torch.nn.utils.clip_grad_norm_`. Knows nothing of what is updated with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tightfit.engine.disk_gradients import DiskGradient
from tightfit.policies import Tier

Gradients = Mapping[nn.Parameter, torch.Tensor | DiskGradient]


def total_norm(
    gradients: Gradients,
    known: Mapping[nn.Parameter, torch.Tensor],
) -> torch.Tensor:
    """The global norm in fp32, that of all norms; `get_total_norm` would round those of 16 bits.

    Args:
        known: norms of some of them, those on the disk at least.
    """
    tensors = [gradient for gradient in gradients.values() if isinstance(gradient, torch.Tensor)]
    whole = len(tensors) == len(gradients)
    if whole and all(gradient.dtype is torch.float32 for gradient in tensors):
        return nn.utils.get_total_norm(tensors)
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if isinstance(gradient, torch.Tensor)
        else known[parameter]
        for parameter, gradient in gradients.items()
    ]
    first = norms[0].device
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(first) for each in norms]))
    return norm


class Clip:
    """The factor of `torch.nn.utils.clip_grad_norm_`, same constant and order, on every tier.

    Args:
        norm: of all gradients, not scaled.
        max_norm: 0 clips nothing.
        scale: what gradients were multiplied by; the factor takes it away.
    """

    def __init__(
        self, norm: torch.Tensor, max_norm: float, device: torch.device, scale: float = 1.0
    ) -> None:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm else None
        if scale != 1.0:
            factor = (torch.ones_like(norm) if factor is None else factor) / scale
        self._on_device = None if factor is None else factor.to(device)
        self._on_host = None if factor is None else factor.cpu()

    def on(self, tier: Tier) -> torch.Tensor | None:
        """The factor where an update on `tier` reads it; None where it would be 1 always."""
        return self._on_device if tier is Tier.DEVICE else self._on_host
