"""A bill as one HTML file: bars with the limit, tables, what was asked and which versions.

The page is ours, drawn with CSS: some 15 KB that open anywhere. Plotly's would have to carry its
library to work without a network, 4.6 MB in every picture, needs scripts, and adds 38 MB to every
installation, for bars that are nothing but rectangles.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from tightfit.bill.table import Kind, MemoryTable
from tightfit.errors import ConfigError
from tightfit.facts.disk import check_writable
from tightfit.planner.plan import Limits
from tightfit.report.chart import Bar, TierChart, tier_charts
from tightfit.report.kinds import LOOKS
from tightfit.report.page import PAGE
from tightfit.units import format_bytes

_LETTER_SHARE = 0.02  # of the scale: a narrower segment has no room for its letter
_PACKAGES = ("tightfit", "torch", "transformers")


@dataclass(frozen=True)
class Picture:
    """What is on the page.

    Attributes:
        facts: names and values about the model and the job, shown above the bars.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    table: MemoryTable
    limits: Limits

    def to_html(self) -> str:
        """The whole page."""
        charts = tier_charts(self.table, self.limits)
        present = {kind for chart in charts for kind in chart.kinds()}
        environment = Environment(
            autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
        )
        return environment.from_string(PAGE).render(
            title=self.title,
            facts=self.facts,
            charts=[_chart(chart) for chart in charts],
            legend=[(LOOKS[kind], str(kind)) for kind in Kind if kind in present],
            tables=[_table(chart) for chart in charts],
            footer=_made_by(),
        )


def check_picture_path(path: Path) -> None:
    """See that a picture can be written; called before the work, which takes seconds.

    Raises:
        ConfigError: something is there already, or the folder may not be written to.
    """
    if os.path.lexists(path):
        raise ConfigError(f"--html {path} is there already; give another file, or delete it first")
    check_writable("--html", path.parent)


def write_picture(path: Path, picture: Picture) -> None:
    """Write the page: all of it or nothing, and never over something; folders are made.

    Raises:
        ConfigError: as `check_picture_path`, or the disk refuses.
    """
    check_picture_path(path)
    temporary = path.with_name(f".{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(picture.to_html(), encoding="utf-8")
        temporary.rename(path)
    except OSError as error:
        if os.path.lexists(temporary):
            temporary.unlink()
        raise ConfigError(f"--html {path} cannot be written: {error}") from None


def _chart(chart: TierChart) -> dict[str, object]:
    limit = chart.drawn_limit_bytes
    return {
        "heading": chart.heading(),
        "over": chart.over_bytes(chart.highest) > 0,
        "limit": None if limit is None else _percent(limit, chart.scale_bytes),
        "bars": [_bar(bar, chart) for bar in chart.bars],
    }


def _bar(bar: Bar, chart: TierChart) -> dict[str, object]:
    over = chart.over_bytes(bar)
    ends = [sum(count for _, count in bar.segments[: i + 1]) for i in range(len(bar.segments))]
    return {
        "phase": str(bar.phase),
        "width": _percent(bar.total_bytes, chart.scale_bytes),
        "total": _cell(bar.total_bytes),
        "over": format_bytes(over) if over else "",
        "beyond": _percent(over, chart.scale_bytes) if over else 0,
        "segments": [
            {
                "look": LOOKS[kind],
                "letter": LOOKS[kind].letter if count > chart.scale_bytes * _LETTER_SHARE else "",
                "bytes": count,
                "said": f"{kind}: {format_bytes(count)}, {count / bar.total_bytes:.1%}",
                "late": end > chart.scale_bytes / 2,  # its tip opens to the left, into the page
            }
            for (kind, count), end in zip(bar.segments, ends, strict=True)
        ],
    }


def _table(chart: TierChart) -> dict[str, object]:
    columns = [dict(bar.segments) for bar in chart.bars]
    return {
        "caption": f"{chart.tier}: bytes by kind at the peak of each phase",
        "phases": [str(bar.phase) for bar in chart.bars],
        "rows": [
            {
                "kind": str(kind),
                "cells": [_cell(column.get(kind, 0)) for column in columns],
            }
            for kind in chart.kinds()
        ],
        "totals": [_cell(bar.total_bytes) for bar in chart.bars],
    }


def _made_by() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"{versions}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 3)


def _cell(count: int) -> str:
    return format_bytes(count) if count else "-"
