"""What an engine does many times over, a dry run does a few times.

Chunks of a loss are alike but for the last: what the second takes beside what the first has left,
every later one takes. Micro-batches are `run.py`'s to leave out, layers `depth.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tightfit.engine import loss

_FIRST = 2  # the first, and one that finds what the first has left


@contextmanager
def few_chunks() -> Iterator[None]:
    """Inside, a loss in chunks makes the first few and the last."""
    original = loss.chunks_of

    def few(tokens: int, chunk_tokens: int) -> Sequence[slice]:
        chunks = original(tokens, chunk_tokens)
        return chunks if len(chunks) <= _FIRST else [*chunks[:_FIRST], chunks[-1]]

    loss.chunks_of = few
    try:
        yield
    finally:
        loss.chunks_of = original
