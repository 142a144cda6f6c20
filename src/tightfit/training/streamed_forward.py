"""The forward of a model on the meta device whose parameters come a module at a time.

For a look at what a model computes, however large it is: a module has its values while it computes,
and no other has. Everything is fp32. Knows nothing of where values come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.engine.tensor_plan import is_adapted

Values = Callable[[str], torch.Tensor]  # of a parameter, by its name in the model of transformers
_Places = list[tuple[nn.Module, str, str]]  # a module, its parameter's name there, and in the model
PEFT_PREFIX = "base_model.model."  # of names in peft's model
_INSIDE = (".base_layer", ".original_module")  # what peft puts around a module


@torch.no_grad()
def logits(root: nn.Module, values: Values, tokens: torch.Tensor) -> torch.Tensor:
    """Of `tokens`, `[batch, seq]`: fp32 `[batch, seq, vocabulary]`.

    Args:
        root: a causal language model, or peft's around one; its buffers are there. What is on the
            meta device comes from `values`, and goes again.
    """
    with ExitStack() as stack:
        for module, places in _visited(root):
            before = module.register_forward_pre_hook(partial(_fetch, values, places))
            after = module.register_forward_hook(partial(_give_up, places), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        found: torch.Tensor = root.eval()(input_ids=tokens, use_cache=False).logits
    return found.float()


def fetch(values: Values, places: _Places) -> None:
    """Give parameters their values."""
    for module, own, name in places:
        module._parameters[own] = nn.Parameter(values(name).float(), requires_grad=False)


def give_up(places: _Places) -> None:
    """Take them away again."""
    for module, own, _ in places:
        parameter = module._parameters[own]
        assert parameter is not None
        module._parameters[own] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def places_in(module: nn.Module, path: str) -> _Places:
    """Those of all parameters on the meta device in a module, which is at `path`."""
    return [
        (inner, own, plain_name(".".join(filter(None, (path, below, own)))))
        for below, inner in module.named_modules()
        for own, parameter in inner.named_parameters(recurse=False)
        if parameter.is_meta
    ]


def plain_name(name: str) -> str:
    """A parameter's name in the model of transformers from that in peft's model."""
    for inside in _INSIDE:
        name = name.replace(inside, "")
    return name.removeprefix(PEFT_PREFIX)


def _visited(root: nn.Module) -> Iterator[tuple[nn.Module, _Places]]:
    """The modules that have parameters of their own, and what they need; an adapter's layer reads
    the layer that it is around, which so has its values as long as the adapter computes."""
    inside: set[nn.Module] = set()
    for path, module in root.named_modules():
        if module in inside:
            continue
        if is_adapted(module):
            inside.update(module.modules())
            places = places_in(module, path)
        else:
            places = [place for place in places_in(module, path) if place[0] is module]
        if places:
            yield module, places


def _fetch(values: Values, places: _Places, *unused: Any) -> None:
    fetch(values, places)


def _give_up(places: _Places, *unused: Any) -> None:
    give_up(places)
