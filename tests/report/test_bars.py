"""Bars in the terminal: lengths that are right, and the same text everywhere."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.report.bars import cells_of, mark_cell, show_bars
from tightfit.report.chart import tier_charts
from tightfit.units import MIB

TIGHT = Limits(device_bytes=2000 * MIB, host_bytes=64000 * MIB)
ANSI = re.compile(r"\x1b\[[0-9;]*m")

kinds = st.dictionaries(st.sampled_from(list(Kind)), st.integers(0, 10**12), min_size=1)


def printed(bill: MemoryTable, width: int = 80, **options: Any) -> str:
    file = io.StringIO()
    show_bars(Console(file=file, width=width, **options), bill, TIGHT)
    return file.getvalue()


@given(phases=st.lists(kinds, min_size=1, max_size=3), limit=st.integers(0, 10**13), across=...)
def test_cells_are_shares_in_order_and_right_about_the_limit(
    phases: list[dict[Kind, int]], limit: int, across: int
) -> None:
    across = 10 + abs(across) % 190
    table = MemoryTable(
        {phase: {Tier.DEVICE: held} for phase, held in zip(Phase, phases, strict=False)}
    )
    for chart in tier_charts(table, Limits(device_bytes=limit)):
        mark = mark_cell(chart, across)
        for bar in chart.bars:
            cells = cells_of(bar, chart, across)
            assert cells == sorted(cells, key=list(Kind).index)
            assert len(cells) <= across
            assert bool(cells) == bool(bar.total_bytes)
            if mark is not None and bar.total_bytes:
                assert (len(cells) > mark) == (bar.total_bytes > limit)
            for kind, count in bar.segments:
                exact = count / chart.scale_bytes * across
                assert (
                    abs(cells.count(kind) - exact) <= 2.5
                )  # ends round by half, limits by one more


def test_the_screen(bill: MemoryTable) -> None:
    lines = printed(bill).splitlines()
    assert lines[:5] == [
        "device: peak 2.25 GiB in backward, device limit 1.95 GiB: 300.0 MiB missing",
        "load     PPPPPPPPPP                              |        500.0 MiB",
        "forward  PPPPPPPPPPOOOOOOOOOOOOOOOOOOOOAAAAAAL   |         1.81 GiB",
        "backward PPPPPPPPPPGGGGGGGGOOOOOOOOOOOOOOOOOOOOTT|TTTTTT   2.25 GiB  +300.0 MiB",
        "step     PPPPPPPPPPGGGGGGGGGGGGOOOOOOOOOOOOOOOOOO|OO       2.05 GiB  +100.0 MiB",
    ]
    assert lines[5] == ""
    assert lines[6].startswith("host: peak 400.0 MiB in forward, host limit 62.50 GiB: fits")
    assert re.fullmatch(r"load {75}-", lines[7])
    assert re.fullmatch(r"forward  I{59}   400\.0 MiB", lines[8])
    legend = " ".join(" ".join(lines[11:]).split())
    assert legend == (
        "P parameters G gradients O optimizer states A activations L logits T temporaries "
        "I pinned and I/O buffers"
    )


def test_kinds_without_a_cell_are_named() -> None:
    held = {Kind.PARAMETERS: MIB, Kind.LOGITS: 1, Kind.BUFFERS: 2}
    lines = printed(MemoryTable({Phase.STEP: {Tier.DEVICE: held}})).splitlines()
    assert lines[-1] == "too small to draw: logits, buffers"


@pytest.mark.parametrize("width", [*range(60, 201, 10), 79, 113])
def test_fits_every_width_in_ascii_without_codes(
    bill: MemoryTable, full_bill: MemoryTable, width: int
) -> None:
    for table in (bill, full_bill):
        text = printed(table, width)
        assert text.isascii()
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= width


def test_an_empty_bill_prints_nothing() -> None:
    assert printed(MemoryTable({})).strip() == ""


@pytest.mark.parametrize("system", ["standard", "256", "truecolor"])
def test_colour_adds_nothing_but_colour(full_bill: MemoryTable, system: str) -> None:
    plain = printed(full_bill)
    coloured = printed(full_bill, force_terminal=True, color_system=system)
    assert coloured != plain
    assert ANSI.sub("", coloured) == plain


def test_no_color_is_heeded(bill: MemoryTable) -> None:
    text = printed(bill, force_terminal=True, no_color=True)
    codes = {code for match in ANSI.findall(text) for code in match[2:-1].split(";")}
    assert codes <= {"0", "1", "2"}  # bold, dim and back: no colours
    assert ANSI.sub("", text) == printed(bill)


def test_over_the_limit_is_red(bill: MemoryTable) -> None:
    text = printed(bill, force_terminal=True, color_system="truecolor")
    red = re.findall(r"\x1b\[1;37;48;2;176;0;32m(\w+)\x1b", text)
    assert "".join(red) == "TTTTTTOO"


def test_a_pipe_of_ascii() -> None:
    code = (
        "from rich.console import Console\n"
        "from tightfit.bill.table import Kind, MemoryTable, Phase\n"
        "from tightfit.planner.plan import Limits\n"
        "from tightfit.policies import Tier\n"
        "from tightfit.report.tables import show_estimate\n"
        "bill = MemoryTable({Phase.STEP: {Tier.DEVICE: {kind: 1 << 30 for kind in Kind}}})\n"
        "show_estimate(Console(), 'Bill', bill, Limits(device_bytes=8 << 30))\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ascii_only, capture_output=True, check=True
    )
    lines = result.stdout.decode("ascii").splitlines()
    assert lines[:2] == [
        "Bill",
        "device: peak 13.00 GiB in step, device limit 8.00 GiB: 5.00 GiB missing",
    ]
    assert "needs 13.00 GiB, device limit 8.00 GiB: 5.00 GiB missing" in lines
    assert result.stderr == b""
