"""Whether a model changes its logits between the output layer and the loss, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
)


def logit_transform(config: Mapping[str, Any]) -> str | None:
    """The key of `config` that makes the model change logits; None where none does."""
    return next((key for key in _TRANSFORMS if config.get(key) not in (None, 1, 1.0)), None)
