"""A probe and the history of runs as tables in the terminal.

Turns plain data into rich renderables. Rates are in powers of ten, as makers of hardware print
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.facts.presets import Card, find_card
from tightfit.monitor.history import History, RunEntry, errors_of, lean_of
from tightfit.planner.probe.figures import (
    CardFigures,
    DiskFigures,
    HostFigures,
    LinkFigures,
    Probe,
)
from tightfit.planner.probe.link import sent_share
from tightfit.units import format_bytes, format_seconds

_FAR = 0.1  # between two predictions that are worth a word
_NARROW = 0.75  # of the nominal copy rate; below it something is wrong with the slot


def show_probe(console: Console, probe: Probe) -> None:
    """Print a probe; of cards that are known with what their makers publish beside it."""
    console.print(Text(_layout(probe)), soft_wrap=True)
    console.print(_host_table(probe.host))
    if probe.matmul:
        console.print(_types_table("CPU, 16-bit products", probe.matmul))
    for card in probe.cards:
        published = find_card(card.name)  # by the driver's name
        console.print(_card_table(card, published))
        for said in pcie_remarks(card, published):
            console.print(Text(said, style="yellow"), soft_wrap=True)
    if probe.link is not None:
        console.print(Text(f"{probe.link.ranks} ranks over {probe.link.backend}", style="bold"))
        console.print(_link_table(probe.link))
        for line in _link_lines(probe.link):
            console.print(Text(line), soft_wrap=True)
    if probe.disk is not None:
        console.print(Text(_disk_line(probe.disk)), soft_wrap=True)
    for note in probe.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _layout(probe: Probe) -> str:
    nodes = len(probe.nodes) or 1
    said = f"{probe.cores} cores usable, {nodes} NUMA node{'s' if nodes > 1 else ''}"
    parts = [f"{number}: {_node(probe, number)}" for number in range(len(probe.nodes))]
    return f"{said} ({'; '.join(parts)})" if parts else said


def _node(probe: Probe, number: int) -> str:
    """What is known of a NUMA node; one may have memory alone."""
    parts = [_counted(len(probe.nodes[number]), "processor")]
    if number < len(probe.node_cores):
        parts.insert(0, _counted(probe.node_cores[number], "core"))
    if number < len(probe.node_bytes):
        parts.append(format_bytes(probe.node_bytes[number]))
    return ", ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _host_table(hosts: Sequence[HostFigures]) -> Table:
    threads = [f"{h.threads} thread{'s' if h.threads > 1 else ''}" for h in hosts]
    table = _table("CPU", *threads)
    for width in sorted({width for host in hosts for width in host.matmul}):
        rates = [_flops(h.matmul.get(width)) for h in hosts]
        table.add_row(f"fp32 products, {width} wide", *rates)
    table.add_row("memory, element-wise into new tensors", *[_gb(h.memory) for h in hosts])
    table.add_row("memory, copied", *[_gb(h.copy) for h in hosts])
    table.add_row("fused AdamW", *[f"{h.optimizer / 1e6:,.0f} Mparam/s" for h in hosts])
    table.add_row("start of an operation", *[_micro(h.operation_seconds) for h in hosts])
    return table


def _types_table(title: str, matmul: Mapping[str, Mapping[int, float]]) -> Table:
    widths = sorted({width for rates in matmul.values() for width in rates})
    table = _table(title, *[f"{width} wide" for width in widths])
    for name, rates in matmul.items():
        table.add_row(name, *[_flops(rates.get(width)) for width in widths])
    return table


def _card_table(card: CardFigures, nominal: Card | None) -> Table:
    """Measured, and where the card is known nominal and the share of it."""
    table = _table(card.name, "measured", "nominal", "reached")

    def row(name: str, value: float, published: float | None, said: Callable[[float], str]) -> None:
        known = ["-", "-"] if published is None else [said(published), f"{value / published:.0%}"]
        table.add_row(name, said(value), *known)

    for name, rates in card.matmul.items():
        published = None if nominal is None else nominal.flops_per_second.get(name)
        widest = max(rates)
        row(f"{name} products, {widest} wide", rates[widest], published, _flops)
        for width in sorted(rates)[-2::-1]:
            table.add_row(f"  {width} wide", _flops(rates[width]), "", "")
    row(
        "memory, element-wise",
        card.memory,
        None if nominal is None else nominal.memory_bytes_per_second,
        _gb,
    )
    pcie = None if nominal is None else nominal.pcie.bytes_per_second
    row("host to card, page-locked", card.copies.to_card, pcie, _gb)
    row("card to host, page-locked", card.copies.to_host, pcie, _gb)
    row("both at once, together", card.copies.both, None if pcie is None else 2 * pcie, _gb)
    row("host to card, pageable", card.copies.pageable_to_card, pcie, _gb)
    row("card to host, pageable", card.copies.pageable_to_host, pcie, _gb)
    table.add_row("fused AdamW", f"{card.optimizer / 1e6:,.0f} Mparam/s", "", "")
    table.add_row("start of an operation", _micro(card.operation_seconds), "", "")
    return table


def pcie_remarks(card: CardFigures, nominal: Card | None) -> Iterable[str]:
    """What is wrong with how a card is connected."""
    link = card.pcie
    if link is not None:
        lanes = max(link.most_lanes, 0 if nominal is None else nominal.pcie.lanes)
        if link.lanes < lanes:
            yield (
                f"{card.name}: PCIe runs at x{link.lanes} of x{lanes}; look at the slot, the riser "
                "and how the mainboard divides its lanes"
            )
        if link.generation < link.most_generation:
            yield (
                f"{card.name}: PCIe runs at generation {link.generation} of "
                f"{link.most_generation} right after copying; look at the mainboard's settings"
            )
    slower = min(card.copies.to_card, card.copies.to_host)
    if nominal is not None and slower < _NARROW * nominal.pcie.bytes_per_second:
        yield (
            f"{card.name}: copies reach {slower / nominal.pcie.bytes_per_second:.0%} of what "
            f"{nominal.pcie} carries"
        )


def _link_table(link: LinkFigures) -> Table:
    names = list(link.lines)
    headers = [(name.replace("_", "-"), "GB/s") for name in names]
    table = _table("tensor", *[header for pair in headers for header in pair])
    taken = {(s.collective, s.whole_bytes): s.seconds for s in link.samples}
    for size in sorted({sample.whole_bytes for sample in link.samples}):
        cells: list[str] = []
        for name in names:
            seconds = taken.get((name, size))
            if seconds is None:
                cells += ["-", "-"]
                continue
            rate = size * sent_share(name, link.ranks) / seconds
            cells += [_micro(seconds), f"{rate / 1e9:.2f}"]
        table.add_row(format_bytes(size), *cells)
    return table


def _link_lines(link: LinkFigures) -> Iterable[str]:
    """The lines that predictions are made from."""
    for name, line in link.lines.items():
        yield (
            f"{name.replace('_', '-')}: {_micro(line.latency_seconds)} and "
            f"{_gb(line.bytes_per_second)} of what each rank sends"
        )
    together = link.together
    if together is not None:
        width = max(together.matmul)
        yield (
            f"each of {link.ranks} ranks while all compute, with {together.threads} "
            f"thread{'s' if together.threads > 1 else ''}: "
            f"{_flops(together.matmul[width])} ({width} wide), memory {_gb(together.memory)}, "
            f"AdamW {together.optimizer / 1e6:,.0f} Mparam/s"
        )


def _disk_line(disk: DiskFigures) -> str:
    return (
        f"disk at {disk.folder}: {_gb(disk.read)} read, {_gb(disk.write)} written "
        f"({format_bytes(disk.written_bytes)}, past the kernel's cache)"
    )


def show_history(console: Console, history: History) -> None:
    """Print every run with its error, the median error, and whether errors lean to one side."""
    if not history.entries:
        console.print("no training run has been recorded yet; `tightfit train` records each")
    else:
        console.print(_history_table(history.entries))
        for line in _history_lines(history.entries):
            console.print(Text(line), soft_wrap=True)
    if history.unread:
        said = f"note: {history.unread} lines of the history could not be read and are left out"
        console.print(Text(said, style="yellow"), soft_wrap=True)


def _history_table(entries: Sequence[RunEntry]) -> Table:
    """A narrow terminal has no room for what was run beside what it took: its lines are in one
    column, broken between words."""
    table = _table("run", "predicted", "measured", "error", "waiting")
    for entry in entries:
        error = entry.error
        waiting = entry.parts.get("communication")
        device = f"{entry.ranks} x {entry.device}" if entry.ranks > 1 else entry.device
        table.add_row(
            f"{entry.date[:16].replace('T', ' ')}\n{entry.model} on {device}\n"
            f"{entry.policies} ({entry.rates})",
            format_seconds(entry.step.predicted),
            "-" if entry.step.measured is None else format_seconds(entry.step.measured),
            "-" if error is None else f"{error:+.0%}",
            "-"
            if entry.ranks == 1 or waiting is None or waiting.measured is None
            else f"{format_seconds(waiting.predicted)} / {format_seconds(waiting.measured)}",
        )
    return table


def _history_lines(entries: Sequence[RunEntry]) -> Iterable[str]:
    errors = errors_of(entries)
    if not errors:
        return
    yield (
        f"{len(errors)} runs: median error {median(errors):+.0%}, median without its sign "
        f"{median(map(abs, errors)):.0%}"
    )
    leans = lean_of(errors)
    if leans is not None:
        wrong = sum((error < 0) == (leans == "short") for error in errors)
        yield (
            f"predictions lean to one side: too {leans} in {wrong} of {len(errors)} runs. Nothing "
            "is corrected by this; a new `tightfit probe` may know the machine better"
        )
    by_source = {
        source: errors_of([e for e in entries if e.rates == source])
        for source in ("probe", "quick")
    }
    if all(by_source.values()):
        probed, quick = (median(map(abs, by_source[source])) for source in ("probe", "quick"))
        if abs(probed - quick) >= _FAR:
            yield f"with a probe {probed:.0%} off in the middle, without one {quick:.0%}"


def _table(*headers: str, left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < left else "right", no_wrap=place >= left)
    return table


def _flops(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
