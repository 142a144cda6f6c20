"""Which parameters an optimizer treats alike, updates together, and can take saved states for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.engine.units import Unit
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import Tier


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases, which have one dimension, do not."""
    everything = list(parameters)
    groups = [
        {"params": [p for p in everything if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def owned(units: Sequence[Unit]) -> dict[Unit, list[nn.Parameter]]:
    """The parameters that are updated with each unit: one of several units with the first."""
    first: dict[nn.Parameter, Unit] = {}
    for unit in units:
        for parameter in unit.parameters:
            first.setdefault(parameter, unit)
    return {unit: [p for p in unit.parameters if first[p] is unit] for unit in units}


def check_halves_are_together(
    on_device: Iterable[nn.Parameter], tiers: Mapping[nn.Parameter, Tier]
) -> None:
    """A split master is half in the parameter: no states may be elsewhere.

    Raises:
        UnsupportedError: some are, as of parameters that several layers share and none can fetch.
    """
    if any(tiers[parameter] is not Tier.DEVICE for parameter in on_device):
        raise UnsupportedError(
            "this model has parameters that stay on the device while their states leave, which a "
            "split master cannot follow; leave optim_master out"
        )


def check_same_parameters(
    here: list[dict[str, Any]],
    entries_of: Callable[[nn.Parameter], Mapping[str, tuple[torch.dtype, torch.Size]]],
    saved: list[dict[str, Any]],
    states: Mapping[int, Mapping[str, torch.Tensor]],
) -> None:
    """Saved states have the names and shapes of those that are here, but for a master, which only
    some tiers and types need.

    Raises:
        ConfigError: they have others.
    """
    wanted = [
        [{name: shape for name, (_, shape) in entries_of(p).items()} for p in group["params"]]
        for group in here
    ]
    found = [
        [{name: t.shape for name, t in states.get(number, {}).items()} for number in g["params"]]
        for g in saved
    ]
    for shapes in (shape for groups in (wanted, found) for group in groups for shape in group):
        shapes.pop("master", None)
    if wanted != found:
        raise ConfigError(
            "the saved optimizer belongs to another model, method or optimizer; fit the model as "
            "it was when the optimizer was saved"
        )
