"""Runs of layers that are placed alike, where a fraction of the layers leaves the device.

Of optimizer states the last layers' leave, of parameters the first layers' do: see
`engine/placement.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tightfit.policies import PlacementPolicy


def runs_of_layers(placement: PlacementPolicy, layers: int) -> list[int]:
    """How many layers each run has, from the first; one run where all are placed alike."""
    bounds = {0, layers}
    if placement.optimizer_fraction < 1:
        bounds.add(layers - math.ceil(placement.optimizer_fraction * layers))
    if placement.parameter_fraction < 1:
        bounds.add(math.ceil(placement.parameter_fraction * layers))
    ends = sorted(bounds)
    return [end - begin for begin, end in pairwise(ends)]


def with_runs(placement: PlacementPolicy, runs: Sequence[int]) -> PlacementPolicy:
    """The placement of fewer layers whose two runs have these lengths."""
    first, second = runs
    layers = first + second
    # In the middle between two numbers of layers, where no rounding can cross.
    if placement.optimizer_fraction < 1:
        return replace(placement, optimizer_fraction=(second - 0.5) / layers)
    return replace(placement, parameter_fraction=(first - 0.5) / layers)
