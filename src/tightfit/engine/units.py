"""A model as units in the order of forward: what is updated, fetched and waited for together.

Each decoder layer is a unit. What belongs to no layer (embedding, last norm, output layer) makes a
unit per module, or one for all of it where shards of it are gathered at once. Every parameter is in
one unit; one that several modules outside of layers share (a tied embedding) is in the first, which
all of them use, and one that several layers share is in each of theirs.
Before a unit's modules run, whoever has work to finish for it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tightfit.engine.layers import decoder_layers, own_layers


@dataclass(eq=False)
class Unit:
    """Parameters that come and go together.

    Attributes:
        name: of the module in the model that it belongs to.
        modules: those that use its parameters; their forward comes after `before_use`.
        parameters: those that are its own.
        is_layer: whether it is one of the decoder's layers.
        before_use: called in this order before each forward of one of its modules.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    is_layer: bool
    before_use: list[Callable[[], None]] = field(default_factory=list)

    def watch(self) -> None:
        """Call `before_use` from now on; hooks that are there already come later."""
        for module in self.modules:
            module.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        for prepare in self.before_use:
            prepare()


def units_of(root: nn.Module, model: PreTrainedModel, *, gathered: bool) -> list[Unit]:
    """The units of `model`, in the order in which forward comes to them.

    Args:
        root: what is called in training: the model, or peft's wrapping of it.
        gathered: whether what belongs to no layer is whole during all of a forward (FSDP2's root
            group), so that it is one unit, used by the model.
    """
    layers = decoder_layers(model)  # what comes before them and after is told by where they are
    in_layers = set(layers.parameters())
    names = {module: name for name, module in root.named_modules()}
    inner = [
        Unit(names[layer], (layer,), _once(layer.parameters()), is_layer=True)
        for layer in own_layers(model)
    ]
    outside = _once(p for p in root.parameters() if p not in in_layers)
    if gathered:
        return [Unit("", (model,), outside, is_layer=False), *inner]
    before, after = _around(root, layers, set(outside), names)
    return [*before, *inner, *after]


def _around(
    root: nn.Module,
    layers: nn.ModuleList,
    outside: set[nn.Parameter],
    names: dict[nn.Module, str],
) -> tuple[list[Unit], list[Unit]]:
    """The units of modules that own `outside` parameters, before and after the layers."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    order = list(root.modules())
    for module in order:
        for parameter in module.parameters(recurse=False):
            if parameter in outside:
                users.setdefault(parameter, []).append(module)
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    for parameter, modules in users.items():
        owned.setdefault(modules[0], []).append(parameter)
    before: list[Unit] = []
    after: list[Unit] = []
    begin = order.index(layers)
    for owner, parameters in owned.items():
        using = _once(module for parameter in parameters for module in users[parameter])
        unit = Unit(names[owner], using, tuple(parameters), is_layer=False)
        (before if order.index(owner) < begin else after).append(unit)
    return before, after


def _once(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))
