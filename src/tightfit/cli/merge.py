"""`tightfit merge`: an adapter and its base as one model, and by how much the two differ."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from tightfit.training.merging import CHECKED_TOKENS, Merged, merge_adapter


def run(adapter: Path, folder: Path, *, base: str | None, precision: str, bits: int | None) -> int:
    """Merge; returns the exit code. See `merge_adapter`."""
    merged = merge_adapter(adapter, folder, base=base, precision=precision, bits=bits)
    console = Console()
    for line in describe(merged, adapter):
        console.print(Text(line), soft_wrap=True)
    return 0


def describe(merged: Merged, adapter: Path) -> list[str]:
    """What came of it, in lines."""
    dtype = str(merged.dtype).removeprefix("torch.")
    exact = f"up to {merged.allowed:.1g} is taken for the rounding of sums"
    if merged.dtype.itemsize < torch.float32.itemsize:
        exact = f"without the rounding of merged weights to {dtype}: {merged.error:.2g}; {exact}"
    lines = [
        f"{merged.base} with the adapter of {adapter}, merged in {dtype}",
        f"logits of {CHECKED_TOKENS} tokens differ from those of base and adapter by up to "
        f"{merged.difference:.2g}; the adapter itself changes them by up to {merged.change:.2g}",
        exact,
    ]
    if merged.untied:
        lines.append(
            "the base's output layer is its embedding, and the adapter changes one of the two: the "
            "merged model has both matrices (tie_word_embeddings: false)"
        )
    return [*lines, f"written: {merged.folder}"]
