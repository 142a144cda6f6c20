"""The label of a token that is not trained: data writes it, every loss leaves it out."""

from __future__ import annotations

IGNORED = -100  # as torch's cross-entropy and transformers have it
