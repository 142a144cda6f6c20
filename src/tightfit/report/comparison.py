"""DDP and ZeRO's stages side by side per card, as a table in the terminal and for programs.

Shows the rows of `tightfit.bill.comparison`; works out only whether they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.bill.comparison import ComparisonRow, StateBill
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from tightfit.planner.elsewhere import Elsewhere

_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_KINDS = {  # columns of the device; what is in none of them is the rest
    "params": (Kind.PARAMETERS,),
    "grads": (Kind.GRADIENTS,),
    "optimizer states": (Kind.OPTIMIZER_STATES, Kind.MASTER_WEIGHTS),
    "gather buffers": (Kind.COLLECTIVES,),
}
_DETAILED_WIDTH = 96  # columns of the terminal that the kinds need
_NOTES = """\
textbook: model states alone, as papers print them. tightfit: everything at the card's peak: model \
states (fp32 master weights among the optimizer states), whole layers beside their shards, and the \
rest: activations, temporaries, runtime, margin."""

_ENGINES = """\
Set up as their users do: parameters in fp32 (DeepSpeed: fp32 masters), 16 bits by autocast or by \
gathering; whole logits unless the loss is in chunks."""

_Column = Callable[[StateBill], int]


def show_strategies(
    console: Console, title: str, rows: Sequence[ComparisonRow], limits: Limits
) -> None:
    """Print one row for each way of sharing the model states out, per card and rank.

    Kinds are shown where the terminal is wide enough. The last column says what fits, where there
    is a limit: `yes`, or how much is missing.
    """
    factor, unit = _unit(rows)
    detailed = console.width >= _DETAILED_WIDTH
    console.print(Text(f"{title}, {unit} per card", style="bold"), soft_wrap=True)
    console.print(_strategies_table(rows, limits, factor, detailed=detailed))
    console.print(Text(_NOTES, style="dim"))


def show_engines(console: Console, title: str, engines: Sequence[Elsewhere]) -> None:
    """Print what the job would take on one card with other engines."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine")
    for header in ("tensors", "card in all"):
        table.add_column(header, justify="right")
    for row in engines:
        table.add_row(
            str(row.engine), format_bytes(row.allocated_bytes), format_bytes(row.device_bytes)
        )
    console.print(table)
    console.print(Text(_ENGINES, style="dim"))


def engines_json(engines: Sequence[Elsewhere]) -> list[dict[str, object]]:
    """One object per engine, documented in docs/json.md."""
    return [
        {
            "engine": str(row.engine),
            "allocated_bytes": row.allocated_bytes,
            "card_bytes": row.device_bytes,
        }
        for row in engines
    ]


def strategies_json(rows: Sequence[ComparisonRow], limits: Limits) -> list[dict[str, object]]:
    """One object per row, documented in docs/json.md; `missing_bytes` is null without limits."""
    return [
        {
            "name": row.name,
            "textbook": _tiers_json(row.textbook),
            "tightfit": _tiers_json(row.tightfit),
            "missing_bytes": missing_bytes(row, limits),
        }
        for row in rows
    ]


def missing_bytes(row: ComparisonRow, limits: Limits) -> int | None:
    """How far the row is over the limits by the `tightfit` bill; None where there are none."""
    table = MemoryTable({Phase.STEP: row.tightfit.tiers})
    return None if limits.tightest(table) is None else max(0, limits.missing_bytes(table))


def _tiers_json(bill: StateBill) -> dict[str, dict[str, int]]:
    return {
        str(tier): {str(kind): count for kind, count in kinds.items() if count}
        for tier, kinds in bill.tiers.items()
        if any(kinds.values())
    }


def _strategies_table(
    rows: Sequence[ComparisonRow], limits: Limits, factor: int, *, detailed: bool
) -> Table:
    columns = _columns(rows, detailed=detailed)
    limited = any(missing_bytes(row, limits) is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy")
    for header in ("textbook", *columns, *(["fits"] if limited else [])):
        style = "bold" if header == "tightfit" else ""
        table.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True, style=style)
    family = ""
    for row in rows:
        if not row.name.startswith(f"{family},"):
            family = row.name
        counts = [row.textbook.device_bytes, *[column(row.tightfit) for column in columns.values()]]
        verdict = [_verdict(row, limits, factor)] if limited else []
        name = row.name.replace(f"{family}, ", "  ")
        table.add_row(name, *[_number(count, factor) for count in counts], *verdict)
    return table


def _columns(rows: Sequence[ComparisonRow], *, detailed: bool) -> dict[str, _Column]:
    """What is shown of each row's `tightfit` bill, by header; what no row has is left out."""
    optional: dict[str, _Column] = {name: partial(_device_bytes, name) for name in _KINDS}
    optional["rest"] = _rest_bytes
    columns: dict[str, _Column] = {"tightfit": lambda bill: bill.device_bytes}
    if detailed:
        columns |= {
            name: column
            for name, column in optional.items()
            if any(column(row.tightfit) for row in rows)
        }
    columns["host"] = lambda bill: bill.host_bytes
    if any(row.tightfit.nvme_bytes for row in rows):
        columns["nvme"] = lambda bill: bill.nvme_bytes
    return columns


def _device_bytes(column: str, bill: StateBill) -> int:
    device = bill.tiers.get(Tier.DEVICE, {})
    return sum(device.get(kind, 0) for kind in _KINDS[column])


def _rest_bytes(bill: StateBill) -> int:
    return bill.device_bytes - sum(_device_bytes(column, bill) for column in _KINDS)


def _unit(rows: Sequence[ComparisonRow]) -> tuple[int, str]:
    """The largest unit in which the highest number has a digit before the point."""
    bills = [bill for row in rows for bill in (row.textbook, row.tightfit)]
    highest = max((max(bill.device_bytes, bill.host_bytes) for bill in bills), default=0)
    return next((unit for unit in _UNITS if highest >= unit[0]), _UNITS[-1])


def _verdict(row: ComparisonRow, limits: Limits, factor: int) -> Text:
    missing = missing_bytes(row, limits)
    if not missing:
        return Text("yes", style="green")
    return Text(f"-{_number(missing, factor)}", style="red")


def _number(count: int, factor: int) -> str:
    """Four digits or more of `count` in the table's unit."""
    value = count / factor
    if not count:
        return "-"
    if value < 0.005:
        return "<0.01"
    return f"{value:.{2 if value < 100 else 1}f}"
