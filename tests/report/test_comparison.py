"""The table of strategies: every figure in its place, and what fits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tightfit.bill.comparison import ComparisonRow, StateBill, compare_sharding
from tightfit.bill.shards import ModelTensors
from tightfit.bill.table import Kind
from tightfit.planner.plan import Limits
from tightfit.policies import Policies, PrecisionPolicy, Tier
from tightfit.report.comparison import missing_bytes, show_strategies, strategies_json
from tightfit.units import GIB, MIB

DEVICE = {
    Kind.PARAMETERS: 13 * GIB,
    Kind.GRADIENTS: 2 * GIB,
    Kind.MASTER_WEIGHTS: 3 * GIB,
    Kind.OPTIMIZER_STATES: 6 * GIB,
    Kind.COLLECTIVES: GIB // 2,
}
HOST = {Kind.OPTIMIZER_STATES: 90 * GIB}
REST = {Kind.ACTIVATIONS: GIB, Kind.LOGITS: 2 * GIB}


def row(name: str, textbook_gib: int, device: dict[Kind, int], **tiers: Any) -> ComparisonRow:
    textbook = StateBill({Tier.DEVICE: {Kind.PARAMETERS: textbook_gib * GIB}})
    others = {Tier(tier): kinds for tier, kinds in tiers.items()}
    return ComparisonRow(name, Policies(), textbook, StateBill({Tier.DEVICE: device, **others}))


ROWS = [
    row("DDP", 104, DEVICE),
    row("DDP, optimizer on host", 13, {Kind.PARAMETERS: 13 * GIB}, host=HOST),
    row("ZeRO-3", 0, {Kind.PARAMETERS: MIB}),
]


def shown(rows: list[ComparisonRow], limits: Limits, width: int = 100) -> list[str]:
    file = io.StringIO()
    show_strategies(Console(file=file, width=width), "7B on 8 cards", rows, limits)
    return file.getvalue().splitlines()


def words(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_kinds_totals_and_what_fits() -> None:
    lines = words(shown(ROWS, Limits(device_bytes=20 * GIB, host_bytes=80 * GIB)))
    assert lines[0] == ["7B", "on", "8", "cards,", "GiB", "per", "card"]
    figures = [line for line in lines if line[-1:] in (["yes"], ["-4.50"], ["-10.00"])]
    assert " ".join(lines[3]) == "strategy textbook tightfit params grads states buffers host fits"
    assert figures == [
        ["DDP", "104.0", "24.50", "13.00", "2.00", "9.00", "0.50", "-", "-4.50"],
        ["optimizer", "on", "host", "13.00", "13.00", "13.00", "-", "-", "-", "90.00", "-10.00"],
        ["ZeRO-3", "-", "<0.01", "<0.01", "-", "-", "-", "-", "yes"],
    ]


def test_what_is_no_model_state_is_the_rest() -> None:
    rows = [row("DDP", 16, {Kind.PARAMETERS: 13 * GIB, **REST})]
    lines = shown(rows, Limits())
    assert ["DDP", "16.00", "16.00", "13.00", "3.00", "-"] in words(lines)
    assert "textbook: model states alone" in " ".join(lines)


def test_columns_that_say_nothing_are_left_out() -> None:
    lines = words(shown([row("DDP", 1, {Kind.PARAMETERS: GIB})], Limits()))
    assert ["strategy", "textbook", "tightfit", "params", "host"] in lines
    rows = [row("DDP", 1, {Kind.PARAMETERS: GIB}, nvme={Kind.OPTIMIZER_STATES: 7 * GIB})]
    assert ["DDP", "1.00", "1.00", "1.00", "-", "7.00"] in words(shown(rows, Limits()))


@pytest.mark.parametrize(
    ("count", "unit", "figure"),
    [(3 * GIB, "GiB", "3.00"), (1023 * MIB, "MiB", "1023.0"), (5 * 1024, "KiB", "5.00")],
)
def test_one_unit_for_all(count: int, unit: str, figure: str) -> None:
    lines = shown([row("DDP", 0, {Kind.PARAMETERS: count})], Limits())
    assert lines[0] == f"7B on 8 cards, {unit} per card"
    assert ["DDP", "-", figure, figure, "-"] in words(lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_real_rows_fit_every_width(width: int) -> None:
    model = ModelTensors.flat(70_000_000_000, layers=80)
    policies = Policies(precision=PrecisionPolicy("bf16"))
    rows = compare_sharding(model, policies, cards=8)
    lines = shown(rows, Limits(device_bytes=80 * GIB, host_bytes=900 * GIB), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    plain = [line.split()[0] for line in lines if line.startswith((" DDP ", " ZeRO-"))]
    assert plain == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert sum("optimizer on host" in line for line in lines) == 4
    # 70e9 * (2 + 2 + 12) bytes, as the ZeRO paper counts
    assert words(lines)[[line.split()[:1] for line in lines].index(["DDP"])][1] == "1043.1"


def test_for_programs() -> None:
    limits = Limits(device_bytes=20 * GIB, host_bytes=80 * GIB)
    first, second, third = strategies_json(ROWS, limits)
    assert first["name"] == "DDP"
    assert first["textbook"] == {"device": {"parameters": 104 * GIB}}
    assert first["missing_bytes"] == 24 * GIB + GIB // 2 - 20 * GIB
    assert second["tightfit"] == {
        "device": {"parameters": 13 * GIB},
        "host": {"optimizer states": 90 * GIB},
    }
    assert second["missing_bytes"] == 10 * GIB
    assert third["missing_bytes"] == 0
    assert missing_bytes(ROWS[0], Limits()) is None
