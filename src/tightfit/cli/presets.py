"""`tightfit presets`: the cards that `gpu` knows."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.facts.presets import Card, presets
from tightfit.units import GIB

_LEGEND = (
    "Memory that torch can have. Dense TFLOP/s, added up in fp32. Links in one direction; * is a "
    "bridge, bought apart. Names may be shorter: 4090, a100-80g. docs/machines.md has the sources."
)


def run(*, as_json: bool) -> int:
    """Print the cards; returns the exit code."""
    if as_json:
        print(json.dumps({card.key: card_json(card) for card in presets()}, indent=2))
        return 0
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("gpu", no_wrap=True)
    for name in ("GiB", "GB/s", "fp32", "16 bits", "PCIe", "cards GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for card in presets():
        table.add_row(*_cells(card))
    console.print(table)
    console.print(Text(_LEGEND), soft_wrap=True)
    return 0


def _cells(card: Card) -> tuple[str, ...]:
    return (
        card.key,
        f"{card.usable_bytes / GIB:.1f}",
        f"{card.memory_bytes_per_second / 1e9:.0f}",
        tflops(card, "fp32"),
        tflops(card, "bf16") if "bf16" in card.flops_per_second else tflops(card, "fp16"),
        f"{card.pcie.generation} x{card.pcie.lanes}",
        _fabric(card),
    )


def tflops(card: Card, precision: str) -> str:
    """A card's dense rate as people write it; `-` where there is none."""
    rate = card.flops_per_second.get(precision)
    return "-" if rate is None else f"{rate / 1e12:.4g}"


def _fabric(card: Card) -> str:
    if card.fabric is None:
        return "-"
    return f"{card.fabric.bytes_per_second / 1e9:.4g}{'' if card.fabric.built_in else '*'}"


def card_json(card: Card) -> dict[str, object]:
    """What programs get of a card."""
    fabric = card.fabric
    return {
        "name": card.name,
        "kind": card.kind,
        "capability": None if card.capability is None else "{}.{}".format(*card.capability),
        "usable_bytes": card.usable_bytes,
        "memory_bytes_per_second": card.memory_bytes_per_second,
        "flops_per_second": dict(card.flops_per_second),
        "pcie": {"generation": card.pcie.generation, "lanes": card.pcie.lanes},
        "fabric": None if fabric is None else dict(fabric.__dict__),
        "sources": list(card.sources),
        "unchecked": list(card.unchecked),
        "note": card.note,
    }
