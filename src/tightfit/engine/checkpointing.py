"""Gradient checkpointing: keep each layer's input, recompute the rest in backward.

Chen et al., https://arxiv.org/abs/1604.06174, through transformers' own switch and torch's
non-reentrant checkpoint, which keeps the random state (dropout draws the same) and needs no
gradient at the input (frozen bases work). Knows nothing of other techniques.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from tightfit.engine.layers import decoder_layers
from tightfit.errors import UnsupportedError
from tightfit.policies import CheckpointingPolicy


def apply_checkpointing(model: PreTrainedModel, policy: CheckpointingPolicy) -> None:
    """Switch it on for every layer, or every so many, if the policy says so.

    With every second layer the first is recomputed, the second is not, and so on.

    Raises:
        UnsupportedError: the model's class does not support it.
    """
    if not policy.enabled:
        return
    if not model.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"{type(model).__name__} does not support gradient checkpointing; "
            "set gradient_checkpointing: false"
        )
    model.activation_checkpointing_enable({"use_reentrant": False})
    for index, layer in enumerate(decoder_layers(model)):
        if index % policy.every:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
