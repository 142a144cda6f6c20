"""Sections of a ledger that follow a model's layers, so that each can be extrapolated by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn

from tightfit.bill.table import Phase
from tightfit.engine.layers import Absent
from tightfit.ledger import Ledger


def follow_layers(layers: nn.ModuleList, counting: Ledger, runs: Sequence[int] = ()) -> None:
    """Open a section of the ledger at each layer, in forward and in backward.

    Args:
        runs: how many layers are placed alike, from the first; all when empty.
    """
    last = len(layers) - 1
    for index, (layer, name) in enumerate(zip(layers, _names(runs or [len(layers)]), strict=True)):
        layer.register_forward_pre_hook(_enter(counting, name, is_first=index == 0))
        layer.register_forward_hook(_leave(counting, name, is_last=index == last))


def follow_stage(layers: nn.ModuleList, counting: Ledger) -> None:
    """The same for a stage of a pipeline, whose forwards and backwards take turns: each is counted
    apart, in a chapter of its own.

    Args:
        layers: of the model; those of other stages are `Absent`.
    """
    numbers = [index for index, layer in enumerate(layers) if not isinstance(layer, Absent)]
    present = set(numbers)
    works = count(1)

    def begin() -> None:
        counting.chapter = f"work {next(works)}, "

    for index in numbers:
        first, last = index - 1 not in present, index + 1 not in present
        name = "first layer" if first else "last layer" if last else "middle layers"
        layers[index].register_forward_pre_hook(
            _enter(counting, name, is_first=first, begin=begin if first else None)
        )
        layers[index].register_forward_hook(
            _leave(counting, name, is_last=last, begin=begin if last else None)
        )


def _names(runs: Sequence[int]) -> Iterator[str]:
    """Of each layer: layers in the middle of a run share one."""
    for number, length in enumerate(runs):
        for index in range(length):
            last = index == length - 1
            name = "first layer" if index == 0 else "last layer" if last else "middle layers"
            yield name + (f" of run {number + 1}" if number else "")


def _enter(
    counting: Ledger, name: str, *, is_first: bool, begin: Callable[[], None] | None = None
) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        phase = counting.section[0]
        if begin is not None and phase is Phase.FORWARD:
            begin()
        counting.set_section(phase, name)
        if phase is Phase.FORWARD and is_first and inputs:
            _when_gradient_arrives(inputs[0], counting, "embedding")

    return hook


def _leave(
    counting: Ledger, name: str, *, is_last: bool, begin: Callable[[], None] | None = None
) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        phase = counting.section[0]
        if phase is Phase.BACKWARD:  # a checkpointed layer that is being recomputed
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if phase is Phase.FORWARD:
            _when_gradient_arrives(hidden, counting, name, begin)
        if is_last:
            counting.set_section(phase, "head")

    return hook


def _when_gradient_arrives(
    tensor: torch.Tensor,
    counting: Ledger,
    name: str,
    begin: Callable[[], None] | None = None,
) -> None:
    def hook(gradient: torch.Tensor) -> None:
        if begin is not None:
            begin()
        counting.set_section(Phase.BACKWARD, name)

    if tensor.requires_grad:
        tensor.register_hook(hook)
