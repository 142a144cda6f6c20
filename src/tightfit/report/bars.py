"""A bill as stacked bars in the terminal: one per phase, for each tier that holds anything.

Every cell carries its kind's letter, so that a pipe, a log or a terminal without colours shows the
same as one with them; all characters are ASCII. Works nothing out: `chart.py` does.
"""

from __future__ import annotations

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from tightfit.bill.table import Kind, MemoryTable
from tightfit.planner.plan import Limits
from tightfit.report.chart import Bar, TierChart, tier_charts
from tightfit.report.kinds import LOOKS
from tightfit.units import format_bytes

_PHASE_WIDTH = 8  # "backward"
_BYTES_WIDTH = 10  # "1023.9 MiB"
_GAPS_WIDTH = 3  # before the bar, for the limit's mark, after the bar
_LEAST_CELLS = 10
_MOST_CELLS = 100  # wider, and the eye loses the way from the bar to its total
_OVER = "bold white on #B00020"


def show_bars(console: Console, table: MemoryTable, limits: Limits) -> None:
    """Print the bars with their limits and totals, and what the letters mean.

    `|` marks a limit; cells beyond it are red. A limit beyond twice the peak is only said.
    """
    drawn: set[Kind] = set()
    charts = tier_charts(table, limits)
    for chart in charts:
        if chart is not charts[0]:
            console.print()
        cells = _cells_across(console.width, chart)
        over = chart.over_bytes(chart.highest) > 0
        console.print(Text(chart.heading(), style="bold red" if over else "bold"))
        for bar in chart.bars:
            kinds = cells_of(bar, chart, cells)
            drawn |= set(kinds)
            console.print(_line(bar, chart, kinds, cells), no_wrap=True, crop=False)
    _show_legend(console, charts, drawn)


def _cells_across(width: int, chart: TierChart) -> int:
    """Cells of the widest bar: what the texts beside it leave of `width` columns."""
    texts = _PHASE_WIDTH + _GAPS_WIDTH + _BYTES_WIDTH
    if chart.over_bytes(chart.highest):
        texts += _BYTES_WIDTH + 3  # two blanks and a plus
    return min(_MOST_CELLS, max(_LEAST_CELLS, width - texts))


def cells_of(bar: Bar, chart: TierChart, across: int) -> list[Kind]:
    """The kind of each cell of `bar`, where `across` cells are the chart's scale.

    Ends of segments are rounded, not their lengths, so that errors do not add up. What is over
    the limit has a cell beyond its mark, and what fits has none.
    """
    total = bar.total_bytes
    if not total:
        return []
    length = max(1, round(total / chart.scale_bytes * across))
    mark = mark_cell(chart, across)
    if mark is not None:
        length = max(length, mark + 1) if chart.over_bytes(bar) else min(length, mark)
    kinds: list[Kind] = []
    reached = 0
    for kind, count in bar.segments:
        reached += count
        kinds += [kind] * (round(reached / total * length) - len(kinds))
    return kinds


def mark_cell(chart: TierChart, across: int) -> int | None:
    """How many of `across` cells lie before the limit's mark; None where it is not drawn.

    There is a cell before every limit but zero, and one beyond every limit that the scale passes.
    """
    limit = chart.drawn_limit_bytes
    if limit is None:
        return None
    if limit == chart.scale_bytes:
        return across
    return max(limit > 0, min(round(limit / chart.scale_bytes * across), across - 1))


def _line(bar: Bar, chart: TierChart, kinds: list[Kind], across: int) -> Text:
    mark = mark_cell(chart, across)
    line = Text(f"{bar.phase:<{_PHASE_WIDTH}} ")
    for cell in range(across + 1):
        if cell == mark:
            line.append("|", style="bold red")
        if cell < len(kinds):
            beyond = mark is not None and cell >= mark
            look = LOOKS[kinds[cell]]
            line.append(look.letter, style=_OVER if beyond else f"{look.ink} on {look.colour}")
        elif cell < across:
            line.append(" ")
    if mark is None:
        line.append(" ")
    total = format_bytes(bar.total_bytes) if bar.total_bytes else "-"
    line.append(f" {total:>{_BYTES_WIDTH}}", style="bold" if bar is chart.highest else "")
    if over := chart.over_bytes(bar):
        line.append(f"  +{format_bytes(over)}", style="bold red")
    return line


def _show_legend(console: Console, charts: list[TierChart], drawn: set[Kind]) -> None:
    present = {kind for chart in charts for kind in chart.kinds()}
    console.print(Columns([swatch(kind) for kind in Kind if kind in drawn], padding=(0, 2)))
    small = [str(kind) for kind in Kind if kind in present - drawn]
    if small:
        console.print(Text(f"too small to draw: {', '.join(small)}", style="dim"))


def swatch(kind: Kind) -> Text:
    """The kind's letter in its colour, and its name."""
    look = LOOKS[kind]
    return Text.assemble((look.letter, f"{look.ink} on {look.colour}"), f" {kind}")
