"""Which parameters' states are on which tier, and where parameters' values are. Moves nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from tightfit.engine.units import Unit
from tightfit.policies import PlacementPolicy, Tier


def state_tiers(units: Sequence[Unit], placement: PlacementPolicy) -> dict[nn.Parameter, Tier]:
    """The tier of the optimizer states of each trained parameter.

    The last layers' leave first: forward comes to them last, so that a lazy step has the most time
    for them.
    """
    leaving = set(last_units(units, placement.optimizer_fraction))
    return {
        parameter: placement.optimizer_states if unit in leaving else Tier.DEVICE
        for unit in units
        for parameter in unit.parameters
        if parameter.requires_grad
    }


def last_units(units: Sequence[Unit], fraction: float) -> list[Unit]:
    """The last layers, as many as `fraction` says; all units where it is 1."""
    if fraction == 1:
        return list(units)
    layers = [unit for unit in units if unit.is_layer]
    return layers[len(layers) - math.ceil(fraction * len(layers)) :]


def first_units(units: Sequence[Unit], fraction: float) -> list[Unit]:
    """The first layers, as many as `fraction` says; all units where it is 1."""
    if fraction == 1:
        return list(units)
    layers = [unit for unit in units if unit.is_layer]
    return layers[: math.ceil(fraction * len(layers))]
