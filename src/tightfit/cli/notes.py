"""The table of what became of a config's keys, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.bill.table import Kind, MemoryTable
from tightfit.interop.conversion import notes_to_show
from tightfit.interop.formats import FORMATS
from tightfit.interop.reading import Reading
from tightfit.interop.translation import SAME, Note
from tightfit.policies import Tier
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.planner.elsewhere import Elsewhere


_COLUMNS = {
    "tensor_bytes": "tensors",
    "card_bytes": "card in all",
    "host_bytes": "host",
    "disk_bytes": "disk",
}
_BOTH = """\
Card in all: with runtime, allocator and, for tightfit, its margin. Host and disk of the other \
tool: model states alone, by its own formula; those of tightfit are all."""


def show_reading(console: Console, reading: Reading) -> None:
    """Print what became of each key of a config."""
    title = f"{reading.name}, a config of {FORMATS[reading.format].title}, here:"
    notes = notes_to_show(reading)
    _show(console, title, [note for note in notes if note.here != SAME])
    same = [note.key for note in notes if note.here == SAME]
    if same:
        said = f"as here anyway: {', '.join(same)}"
        console.print(Text(said, style="dim"), soft_wrap=True)


def show_left_out(console: Console, title: str, notes: Sequence[Note]) -> None:
    """Print what a file that was written cannot say."""
    if notes:
        _show(console, title, notes)


def show_both(console: Console, reading: Reading, theirs: Elsewhere, ours: MemoryTable) -> None:
    """Print what the config takes with its own tool and with tightfit, for each rank."""
    rows = _both(reading, theirs, ours)
    columns = [name for name in _COLUMNS if any(row[name] for row in rows.values())]
    console.print()
    console.print(Text(f"{reading.name}, for each rank", style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("with")
    for name in columns:
        table.add_column(_COLUMNS[name], justify="right")
    for title, row in rows.items():
        cells = (format_bytes(row[name]) if row[name] else "-" for name in columns)
        table.add_row(title, *cells)
    console.print(table)
    console.print(Text(_BOTH, style="dim"), soft_wrap=True)


def reading_json(reading: Reading, theirs: Elsewhere, ours: MemoryTable) -> dict[str, object]:
    """The object documented in docs/json.md."""
    return {
        "file": reading.name,
        "format": reading.format,
        "keys": dict(reading.settings),
        "notes": [vars(note) for note in notes_to_show(reading)],
        "bills": _both(reading, theirs, ours),
    }


def _both(reading: Reading, theirs: Elsewhere, ours: MemoryTable) -> dict[str, dict[str, int]]:
    kinds = ours.kinds_at_peak(Tier.DEVICE)
    beyond = sum(kinds.get(kind, 0) for kind in (Kind.RUNTIME, Kind.ALLOCATOR, Kind.MARGIN))
    whole = ours.peak_bytes(Tier.DEVICE)
    return {
        f"{reading.tool.name} ({theirs.engine})": {
            "tensor_bytes": theirs.allocated_bytes,
            "card_bytes": theirs.device_bytes,
            "host_bytes": theirs.host_bytes,
            "disk_bytes": theirs.disk_bytes,
        },
        "tightfit": {
            "tensor_bytes": whole - beyond,
            "card_bytes": whole,
            "host_bytes": ours.peak_bytes(Tier.HOST) + ours.peak_bytes(Tier.PINNED),
            "disk_bytes": ours.peak_bytes(Tier.NVME),
        },
    }


def _show(console: Console, title: str, notes: Sequence[Note]) -> None:
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("there", overflow="fold", min_width=28)
    table.add_column("here", overflow="fold")
    for note in notes:
        there = f"{note.key}: {note.value}" if note.key else "(not said)"
        here = "; ".join(part for part in (note.here, note.why) if part)
        table.add_row(Text(there), Text(here))
    console.print(table)
