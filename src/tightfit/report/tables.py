"""Bills, plans and comparisons as tables in the terminal.

Turns plain data into rich renderables; works nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tightfit.bill.table import Difference, Kind, MemoryTable, Phase
from tightfit.planner.plan import Candidate, Limits, Plan, Slower
from tightfit.planner.purchases import Purchase
from tightfit.planner.words import describe_policies
from tightfit.policies import Tier
from tightfit.report.bars import show_bars, swatch
from tightfit.report.kinds import LOOKS
from tightfit.units import format_bytes, format_seconds

_SHOWN_ALTERNATIVES = 12
_WIDE = 1000  # columns that no table needs
_SMALL_SHARE = 0.001  # of the highest total: rows below are in report.json only


def show_bill(console: Console, title: str, bill: MemoryTable, limits: Limits) -> None:
    """Print a bill: kinds x tiers at each tier's peak, phases x tiers, and the shortage."""
    console.print(Text(title, style="bold"))
    console.print(_kinds_table(bill), _phases_table(bill))
    console.print(_shortage(bill, limits))


def show_estimate(console: Console, title: str, bill: MemoryTable, limits: Limits) -> None:
    """Print a bill for somebody who reads one for the first time.

    Bars of every phase and tier with their limits, what fills the tiers at their peaks and what
    each kind is (where the width allows), and whether it fits.
    """
    console.print(Text(title, style="bold"), soft_wrap=True)
    show_bars(console, bill, limits)
    table = _explained_table(bill, with_meanings=True)
    if console.measure(table, options=console.options.update_width(_WIDE)).maximum > console.width:
        table = _explained_table(bill, with_meanings=False)
    console.print(table)
    console.print(_shortage(bill, limits))


def _explained_table(bill: MemoryTable, *, with_meanings: bool) -> Table:
    tiers = bill.tiers()
    table = _table("at the peak", *[f"{tier} ({bill.peak_phase(tier)})" for tier in tiers])
    if with_meanings:
        table.add_column("what it is", style="dim", no_wrap=True)
    for kind in Kind:
        counts = [bill.kinds_at_peak(tier).get(kind, 0) for tier in tiers]
        if any(counts):
            cells = [
                f"{format_bytes(count)} {count / bill.peak_bytes(tier):4.0%}" if count else "-"
                for tier, count in zip(tiers, counts, strict=True)
            ]
            meaning = [LOOKS[kind].meaning] if with_meanings else []
            table.add_row(swatch(kind), *cells, *meaning)
    table.add_section()
    table.add_row("peak", *[f"{format_bytes(bill.peak_bytes(tier))} 100%" for tier in tiers])
    return table


def _kinds_table(bill: MemoryTable) -> Table:
    tiers = bill.tiers()
    table = _table("at the peak", *[f"{tier} ({bill.peak_phase(tier)})" for tier in tiers])
    for kind in Kind:
        counts = [bill.kinds_at_peak(tier).get(kind, 0) for tier in tiers]
        if any(counts):
            table.add_row(str(kind), *map(_cell, counts))
    table.add_section()
    table.add_row("peak", *[format_bytes(bill.peak_bytes(tier)) for tier in tiers], style="bold")
    return table


def _phases_table(bill: MemoryTable) -> Table:
    tiers = bill.tiers()
    table = _table("peak by phase", *map(str, tiers))
    for phase in Phase:
        counts = [bill.phase_peak_bytes(phase, tier) for tier in tiers]
        if any(counts):
            table.add_row(str(phase), *map(_cell, counts))
    return table


def _shortage(bill: MemoryTable, limits: Limits) -> Text:
    tightest, missing = limits.tightest(bill), limits.missing_bytes(bill)
    if tightest is not None and missing > 0:
        return Text(f"{tightest}: {format_bytes(missing)} missing", style="red")
    limit = limits.device_bytes
    said = "no device limit" if limit is None else f"device limit {format_bytes(limit)}"
    need = format_bytes(bill.peak_bytes(Tier.DEVICE))
    return Text(f"needs {need}, {said}: fits", style="green")


def show_plan(console: Console, plan: Plan, *, written: bool = False) -> None:
    """Print a plan: what was chosen and why, what was turned down and why, peaks and time.

    Args:
        written: whether a plan.yaml will have all that was turned down.
    """
    console.print(Text("Plan: " + describe_policies(plan.policies), style="bold"), soft_wrap=True)
    for reason in plan.reasons:
        console.print(Text(f"  + {reason}"), soft_wrap=True)
    if not plan.reasons:
        console.print(Text("  plain training; no technique is needed"))
    for note in plan.notes:
        console.print(Text(f"  note: {note}", style="yellow"), soft_wrap=True)
    if plan.alternatives:
        console.print(_alternatives_table(plan.alternatives, written=written))
    if plan.slower:
        console.print(_slower_table(plan.slower))
    console.print(Text(_peaks(plan)), Text(_seconds(plan)), sep="\n", soft_wrap=True)
    if plan.bottleneck:
        console.print(Text(f"  {plan.bottleneck}"), soft_wrap=True)
    if plan.rates.said:
        console.print(Text(f"  {plan.rates.said}", style="dim"), soft_wrap=True)


def show_purchases(console: Console, bought: Sequence[Purchase]) -> None:
    """Print what buying would change."""
    console.print(Text("What buying would change", style="bold"))
    for one in bought:
        console.print(Text(f"  {one}"), soft_wrap=True)
    if not bought:
        console.print(
            Text("  describe the machine (gpu: rtx-4090, ram: 64GiB) to be told of more cards")
        )


def _peaks(plan: Plan) -> str:
    tiers = plan.bill.tiers()
    peaks = ", ".join(f"{tier} {format_bytes(plan.bill.peak_bytes(tier))}" for tier in tiers)
    return f"predicted peak: {peaks}"


def _seconds(plan: Plan) -> str:
    parts = ", ".join(
        f"{name} {format_seconds(seconds)}"
        for name, seconds in plan.step_time.to_json().items()
        if name != "total" and seconds >= 0.001
    )
    return f"predicted step: {format_seconds(plan.step_time.total)} ({parts})"


def _slower_table(slower: Sequence[Slower]) -> Table:
    table = _table("not taken, the fastest of its kind", "because", right=False)
    for one in slower:
        table.add_row(one.kind, one.verdict)
    return table


def _alternatives_table(alternatives: tuple[Candidate, ...], *, written: bool) -> RenderableType:
    table = _table("turned down, fastest first", "because", right=False)
    for candidate in alternatives[:_SHOWN_ALTERNATIVES]:
        table.add_row(describe_policies(candidate.policies), candidate.verdict)
    more = len(alternatives) - _SHOWN_ALTERNATIVES
    where = "in plan.yaml" if written else "with --json"
    return table if more <= 0 else Group(table, Text(f"  and {more} more {where}"))


def show_comparison(console: Console, rows: list[Difference]) -> None:
    """Print predicted beside measured: totals of every phase and tier, kinds at its peak.

    Totals that were predicted too low are red. What only one side knows is said to be so; of a
    phase and tier that only one knows, the total is enough.
    """
    least = _SMALL_SHARE * max((_larger(row) for row in rows), default=0)
    table = _table("predicted beside measured", "predicted", "measured", "error")
    one_sided = {(r.phase, r.tier) for r in rows if r.kind is None and _is_one_sided(r)}
    for row in rows:
        if _larger(row) < least or (row.kind and (row.phase, row.tier) in one_sided):
            continue
        if row.kind is None:
            table.add_section()
        name = f"{row.phase}, {row.tier}" if row.kind is None else f"  {row.kind}"
        counts = (_cell(row.predicted_bytes), _cell(row.measured_bytes))
        table.add_row(name, *counts, _error(row), style=_difference_style(row))
    console.print(table)
    if rows:
        console.print(Text(_furthest_off(rows)), soft_wrap=True)


def _larger(row: Difference) -> int:
    return max(row.predicted_bytes, row.measured_bytes)


def _apart(row: Difference) -> int:
    return abs(row.predicted_bytes - row.measured_bytes)


def _is_one_sided(row: Difference) -> bool:
    return not row.predicted_bytes or not row.measured_bytes


def _error(row: Difference) -> str:
    if row.kind is Kind.MARGIN:
        return ""  # nothing that could be measured
    if not row.predicted_bytes:
        return "only measured"
    return "only predicted" if row.error is None else f"{row.error:+.2%}"


def _difference_style(row: Difference) -> str | None:
    if row.kind is not None:
        return None
    return "bold red" if row.predicted_bytes < row.measured_bytes else "bold"


def _furthest_off(rows: list[Difference]) -> str:
    """The total that is furthest from what was measured, among those that both sides know."""
    totals = [row for row in rows if row.kind is None]
    both = [row for row in totals if not _is_one_sided(row)]
    if not both:
        return "predicted and measured have no phase in common"
    worst = max(both, key=_apart)
    if not _apart(worst):
        return "every total was predicted to the byte"
    parts = [r for r in rows if r.kind and (r.phase, r.tier) == (worst.phase, worst.tier)]
    most = max(parts, key=_apart)
    return (
        f"furthest off: {worst.phase}, {worst.tier} by {format_bytes(_apart(worst))} "
        f"({_error(worst)}), most of it {most.kind}"
    )


def _table(*headers: str, right: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    first, *rest = headers
    table.add_column(first)
    for header in rest:
        table.add_column(header, justify="right" if right else "left")
    return table


def _cell(count: int) -> str:
    return format_bytes(count) if count else "-"
