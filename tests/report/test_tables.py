"""Tables say what the data says, whatever the width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tightfit.bill.table import Kind, MemoryTable, Phase, compare
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.report.tables import show_bill, show_comparison
from tightfit.units import MIB

BILL = MemoryTable(
    {
        Phase.FORWARD: {
            Tier.DEVICE: {Kind.PARAMETERS: 2 * MIB, Kind.ACTIVATIONS: 3 * MIB},
            Tier.HOST: {Kind.OPTIMIZER_STATES: 4 * MIB},
        },
        Phase.STEP: {Tier.DEVICE: {Kind.PARAMETERS: 2 * MIB}, Tier.HOST: {}},
    }
)


def shown(limits: Limits, bill: MemoryTable = BILL) -> list[str]:
    file = io.StringIO()
    show_bill(Console(file=file, width=80), "Bill", bill, limits)
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_kinds_by_tiers_and_phases_by_tiers() -> None:
    lines = shown(Limits(device_bytes=10 * MIB))
    for line in (
        "at the peak device (forward) host (forward)",
        "parameters 2.0 MiB -",
        "activations 3.0 MiB -",
        "optimizer states - 4.0 MiB",
        "peak 5.0 MiB 4.0 MiB",
        "peak by phase device host",
        "forward 5.0 MiB 4.0 MiB",
        "step 2.0 MiB -",
    ):
        assert line in lines, line
    assert not any("gradients" in line for line in lines)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(), "needs 5.0 MiB, no device limit: fits"),
        (Limits(device_bytes=5 * MIB), "needs 5.0 MiB, device limit 5.0 MiB: fits"),
        (Limits(device_bytes=4 * MIB), "needs 5.0 MiB, device limit 4.0 MiB: 1.0 MiB missing"),
        (Limits(host_bytes=3 * MIB), "needs 4.0 MiB, host limit 3.0 MiB: 1.0 MiB missing"),
        (Limits(shared_bytes=7 * MIB), "needs 9.0 MiB, RAM limit 7.0 MiB: 2.0 MiB missing"),
    ],
)
def test_the_shortage(limits: Limits, said: str) -> None:
    assert said in shown(limits)


def test_the_comparison() -> None:
    file = io.StringIO()
    show_comparison(Console(file=file, width=80), compare(BILL.with_margin(0.5), BILL))
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert "forward, device 7.5 MiB 5.0 MiB +50.00%" in lines
    assert "activations 3.0 MiB 3.0 MiB +0.00%" in lines
    assert "margin 2.5 MiB -" in lines
