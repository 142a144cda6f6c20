"""Steps of an engine on batches that seeds make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tightfit.engine.engine import Engine


def norms_of_steps(
    engine: Engine, make_batch: Callable[..., Any], seeds: Iterable[int]
) -> list[float]:
    """The norm of each step, one for a seed."""
    norms = []
    for seed in seeds:
        ids, labels = make_batch(seed)
        engine.backward(engine.loss(ids, labels, 30))
        norms.append(engine.step())
    return norms
