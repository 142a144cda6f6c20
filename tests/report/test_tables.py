"""Tables say what the data says, whatever the width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tightfit.bill.table import Difference, Kind, MemoryTable, Phase
from tightfit.planner.plan import Candidate, Limits, Plan, Slower, StepTime
from tightfit.policies import Policies, Tier
from tightfit.report.tables import show_bill, show_comparison, show_estimate, show_plan
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


def estimate(bill: MemoryTable, width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width)
    show_estimate(console, "Bill", bill, Limits(device_bytes=2000 * MIB))
    return file.getvalue().splitlines()


def test_an_estimate_shows_bars_shares_meanings_and_the_shortage(bill: MemoryTable) -> None:
    lines = [" ".join(line.split()) for line in estimate(bill, 100)]
    assert lines[1] == (
        "device: peak 2.25 GiB in backward, device limit 1.95 GiB: 300.0 MiB missing"
    )
    for line in (
        "at the peak device (backward) host (forward) what it is",
        "P parameters 500.0 MiB 22% - the model's weights",
        "O optimizer states 1000.0 MiB 43% - running averages of gradients",
        "A activations 4 B 0% - kept by forward for backward",
        "I pinned and I/O buffers - 400.0 MiB 100% landing places of copies",
        "peak 2.25 GiB 100% 400.0 MiB 100%",
    ):
        assert line in lines, line
    assert lines[-1] == "needs 2.25 GiB, device limit 1.95 GiB: 300.0 MiB missing"


def test_a_narrow_estimate_leaves_meanings_out(bill: MemoryTable) -> None:
    lines = estimate(bill, 70)
    assert max(map(len, lines)) <= 70
    assert "P parameters 500.0 MiB 22% -" in [" ".join(line.split()) for line in lines]
    assert not any("meaning" in line or "the model's weights" in line for line in lines)


TIME = StepTime(compute=3.1, recompute=0, optimizer=0, copies=0, overhead=0)
PLAN = Plan(
    Policies(), BILL, BILL, TIME, Limits(), 1, 0, (),
    alternatives=(Candidate(Policies(), None, TIME, "8 GiB too much"),) * 14,
    slower=(
        Slower("ZeRO-3", Policies(), 5.2, "slower: 5.2 s, this plan 3.1 s"),
        Slower("LoRA", None, None, "it changes the numbers"),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("written", "where"), [(True, "in plan.yaml"), (False, "with --json")])
def test_a_plan_shows_what_was_turned_down_and_what_is_slower(written: bool, where: str) -> None:
    file = io.StringIO()
    show_plan(Console(file=file, width=100), PLAN, written=written)
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert lines.count("micro-batch 1 x 1 8 GiB too much") == 12
    assert f"and 2 more {where}" in lines
    assert "ZeRO-3 slower: 5.2 s, this plan 3.1 s" in lines
    assert "LoRA it changes the numbers" in lines


def compared(rows: list[Difference]) -> list[str]:
    file = io.StringIO()
    show_comparison(Console(file=file, width=100), rows)
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_the_comparison() -> None:
    lines = compared(BILL.with_margin(0.5).diff(BILL))
    assert "forward, device 7.5 MiB 5.0 MiB +50.00%" in lines
    assert "activations 3.0 MiB 3.0 MiB +0.00%" in lines
    assert "margin 2.5 MiB -" in lines
    assert lines[-1] == "furthest off: forward, device by 2.5 MiB (+50.00%), most of it margin"


def test_what_one_side_does_not_know_is_said_to_be_so() -> None:
    rows = [
        Difference(Phase.FORWARD, Tier.DEVICE, None, 110 * MIB, 100 * MIB),
        Difference(Phase.FORWARD, Tier.DEVICE, Kind.PARAMETERS, 110 * MIB, 0),
        Difference(Phase.FORWARD, Tier.DEVICE, Kind.LOGITS, 0, 100 * MIB),
        Difference(Phase.FORWARD, Tier.DEVICE, Kind.BUFFERS, 1024, 1024),
        Difference(Phase.EVAL, Tier.DEVICE, None, 90 * MIB, 0),
        Difference(Phase.EVAL, Tier.DEVICE, Kind.ACTIVATIONS, 90 * MIB, 0),
        Difference(Phase.RESUME, Tier.DEVICE, None, 0, 80 * MIB),
        Difference(Phase.RESUME, Tier.DEVICE, Kind.TEMPORARIES, 0, 80 * MIB),
    ]
    lines = [line for line in compared(rows) if line]
    assert lines[2:] == [
        "forward, device 110.0 MiB 100.0 MiB +10.00%",
        "parameters 110.0 MiB - only predicted",
        "logits - 100.0 MiB only measured",
        "eval, device 90.0 MiB - only predicted",
        "resume, device - 80.0 MiB only measured",
        "furthest off: forward, device by 10.0 MiB (+10.00%), most of it parameters",
    ]


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [
        (5, 5, "every total was predicted to the byte"),
        (5, 0, "predicted and measured have no phase in common"),
        (0, 5, "predicted and measured have no phase in common"),
    ],
)
def test_the_last_line(predicted: int, measured: int, said: str) -> None:
    rows = [
        Difference(Phase.STEP, Tier.DEVICE, kind, predicted, measured)
        for kind in (None, Kind.PARAMETERS)
    ]
    assert compared(rows)[-1] == said


@pytest.mark.parametrize(("predicted", "red"), [(99, True), (100, False), (101, False)])
def test_totals_that_were_too_low_are_red(predicted: int, red: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="truecolor")
    kinds = (None, Kind.LOGITS)
    rows = [Difference(Phase.STEP, Tier.DEVICE, kind, predicted, 100) for kind in kinds]
    show_comparison(console, rows)
    assert ("\x1b[1;31m" in file.getvalue()) == red


def test_nothing_to_compare_is_no_fault() -> None:
    assert "predicted beside measured predicted measured error" in compared([])
