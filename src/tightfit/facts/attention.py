"""Which implementation of attention an architecture has in transformers, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Their scores are capped or have sinks, which torch's scaled_dot_product_attention cannot do.
_WITHOUT_SDPA = ("gemma2", "gpt_oss")


def default_attention(config: Mapping[str, Any]) -> str:
    """`sdpa`, or `eager` where the architecture has none."""
    return "eager" if config.get("model_type") in _WITHOUT_SDPA else "sdpa"
