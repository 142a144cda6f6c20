"""Which implementation of attention an architecture has in transformers, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Scores that are capped, have sinks or a bias of their own, which torch's
# scaled_dot_product_attention cannot do, or that transformers has not brought to it.
_WITHOUT_SDPA = ("bloom", "gemma2", "gpt_neo", "gpt_oss", "mpt")


def default_attention(config: Mapping[str, Any]) -> str:
    """`sdpa`, or `eager` where the architecture has none."""
    return "eager" if config.get("model_type") in _WITHOUT_SDPA else "sdpa"
