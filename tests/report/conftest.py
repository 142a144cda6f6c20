"""Bills for the tests of what shows them, with every figure chosen by hand."""

from __future__ import annotations

import pytest

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.policies import Tier
from tightfit.units import MIB

_PARAMETERS = {Kind.PARAMETERS: 500 * MIB}
_STATES = {**_PARAMETERS, Kind.OPTIMIZER_STATES: 1000 * MIB}

# Device peak 2300 MiB in backward, host peak 400 MiB in forward.
_BILL = MemoryTable(
    {
        Phase.LOAD: {Tier.DEVICE: _PARAMETERS},
        Phase.FORWARD: {
            Tier.DEVICE: {**_STATES, Kind.ACTIVATIONS: 300 * MIB, Kind.LOGITS: 50 * MIB},
            Tier.HOST: {Kind.TRANSFER: 400 * MIB},
        },
        Phase.BACKWARD: {
            Tier.DEVICE: {
                **_STATES,
                Kind.GRADIENTS: 400 * MIB,
                Kind.ACTIVATIONS: 4,
                Kind.TEMPORARIES: 400 * MIB - 4,
            },
            Tier.HOST: {},
        },
        Phase.STEP: {Tier.DEVICE: {**_STATES, Kind.GRADIENTS: 600 * MIB}},
    }
)

# Every kind and every tier at once.
_FULL = MemoryTable(
    {Phase.STEP: {tier: {kind: (40 - 2 * i) * MIB for i, kind in enumerate(Kind)} for tier in Tier}}
)


@pytest.fixture
def bill() -> MemoryTable:
    """A job on two tiers that takes most on the device in backward."""
    return _BILL


@pytest.fixture
def full_bill() -> MemoryTable:
    """One phase with every kind on every tier, 364 MiB on each."""
    return _FULL
