"""`tightfit probe`: what this machine can do, measured, shown and kept; and how predictions did."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from tightfit.errors import ConfigError, RankError, TightfitError
from tightfit.facts.hardware import Hardware, describe
from tightfit.facts.processors import count_cores, cpu_quota, node_bytes, numa_nodes
from tightfit.launch.link import measure_link
from tightfit.monitor.history import history_file, read_history
from tightfit.planner.machine import usable_hardware
from tightfit.planner.probe.busy import OthersBusy
from tightfit.planner.probe.disk import ASK_BYTES, bytes_to_write, measure_disk_under
from tightfit.planner.probe.figures import ADAPTER, DiskFigures, LinkFigures, Probe
from tightfit.planner.probe.host import (
    MORE_ROUNDS,
    best_of,
    measure_cards,
    measure_host,
    measure_types,
    thread_counts,
)
from tightfit.planner.probe.kept import identity_of, read_probe, write_probe
from tightfit.planner.probe.known import MUCH
from tightfit.report.probe import show_history, show_probe
from tightfit.units import format_bytes, parse_bytes

_DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        ranks: between which the link is measured; None is one for each card, or two on a CPU.
        folder: on the disk that is measured.
        disk_bytes: to write there; None lets the probe choose, 0 leaves the disk out.
        yes: nobody is to be asked.
    """

    ranks: int | None
    folder: Path
    disk_bytes: int | None
    yes: bool

    @classmethod
    def of(
        cls, *, ranks: str | None, folder: str, size: str | None, disk: bool, yes: bool
    ) -> Wanted:
        """From words of the command line.

        Raises:
            ConfigError: one of them cannot be read, or they contradict each other.
        """
        if ranks is not None and (not ranks.isdecimal() or int(ranks) < 1):
            raise ConfigError(f"--num_gpus {ranks} is no number of ranks; give 1 or more")
        if not disk and size is not None:
            raise ConfigError("--no-disk and --disk-size contradict each other; give one")
        try:
            count = None if size is None else parse_bytes(size)
        except ValueError as error:
            raise ConfigError(f"--disk-size: {error}") from None
        return cls(None if ranks is None else int(ranks), Path(folder), count if disk else 0, yes)


def run(wanted: Wanted, *, as_json: bool) -> int:
    """Measure this machine, show and keep what was found; returns the exit code."""
    hardware = usable_hardware(wanted.folder)
    size = _disk_bytes(wanted)
    ranks = _ranks(wanted, hardware)
    with _showing_progress() as say:
        probe = _measure(wanted.folder, hardware, ranks, size, say)
    kept = _keep(probe)
    hardware = usable_hardware(wanted.folder)
    if as_json:
        print(json.dumps(_as_json(probe, hardware), indent=2))
        return 0
    console = Console()
    for line in describe(hardware):
        console.print(Text(line), soft_wrap=True)
    show_probe(console, probe)
    console.print(Text(kept), soft_wrap=True)
    return 0


def run_history(*, as_json: bool) -> int:
    """Show predicted beside measured of all training runs; returns the exit code."""
    try:
        history = read_history()
    except OSError as error:
        raise TightfitError(f"{history_file()} cannot be read: {error.strerror}") from error
    if as_json:
        print(json.dumps(history.to_json(), indent=2))
    else:
        show_history(Console(), history)
    return 0


def _ranks(wanted: Wanted, hardware: Hardware) -> int:
    """How many ranks measure their link; 1 is none.

    Raises:
        ConfigError: there are fewer cards.
    """
    cards = len(hardware.accelerators)
    if wanted.ranks is None:
        return min(cards, torch.cuda.device_count()) if cards else _DEFAULT_CPU_RANKS
    if cards and wanted.ranks > cards:
        raise ConfigError(
            f"--num_gpus {wanted.ranks}: this process sees {cards} cards; each rank has one"
        )
    return wanted.ranks


def _disk_bytes(wanted: Wanted) -> int:
    """How much to write; asks before it is much.

    Raises:
        ConfigError: it is too much for the disk, or nobody can be asked and nobody has said yes.
    """
    if wanted.disk_bytes == 0:
        return 0
    size = bytes_to_write(wanted.folder, wanted.disk_bytes)
    if size <= ASK_BYTES or wanted.yes:
        return size
    question = f"{format_bytes(size)} will be written to the disk under {wanted.folder.absolute()}"
    if not sys.stdin.isatty():
        raise ConfigError(f"{question}; say --yes to that, or give a smaller --disk-size")
    print(f"{question}, and taken away again. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().casefold() not in ("y", "yes"):
        raise ConfigError("not measured; give a smaller --disk-size, or --no-disk")
    return size


Say = Callable[[str], None]


def _measure(folder: Path, hardware: Hardware, ranks: int, size: int, say: Say) -> Probe:
    busy = OthersBusy()
    notes: list[str] = []
    cores = _usable_cores()
    counts = thread_counts(cores)
    say("the CPU")
    with busy.watching():
        host = measure_host(counts)
        matmul = measure_types(cores)
    if busy.cores > MUCH * (os.cpu_count() or 1):
        say("the CPU again, as others are busy")
        with busy.watching():
            again = measure_host(counts, MORE_ROUNDS)
            host = [best_of(one, other) for one, other in zip(host, again, strict=True)]
    say("the cards")
    cards = measure_cards(hardware.accelerators, lambda: usable_hardware(folder).accelerators)
    link = _link(ranks, hardware, notes, say) if ranks > 1 else None
    disk = _disk(folder, size, notes, say) if size else None
    nodes = numa_nodes()
    probe = Probe(
        schema=1,
        identity=identity_of(hardware),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        busy_cores=busy.cores,
        nodes=tuple(tuple(sorted(node)) for node in nodes),
        node_cores=tuple(count_cores(node) for node in nodes),
        node_bytes=tuple(node_bytes()),
        cores=cores,
        host=tuple(host),
        matmul=matmul,
        cards=tuple(cards),
        disk=disk,
        link=link,
        notes=tuple(notes),
    )
    if _busy_share(probe) <= MUCH:
        return probe
    said = (
        f"other processes kept {_busy_share(probe):.0%} of the processors busy meanwhile: figures "
        "of the CPU may be far too low; probe again when the machine is free"
    )
    return replace(probe, notes=(*probe.notes, said))


def _busy_share(probe: Probe) -> float:
    """What others took of the machine's processors."""
    return probe.busy_cores / probe.identity.processors


def _usable_cores() -> int:
    """Cores that this process may use; two threads of one core count as one."""
    quota = cpu_quota()
    cores = count_cores(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def _link(ranks: int, hardware: Hardware, notes: list[str], say: Say) -> LinkFigures | None:
    say(f"the link between {ranks} ranks")
    try:
        return measure_link(ranks, hardware.device_kind)
    except RankError as error:
        notes.append(f"the link between {ranks} ranks could not be measured: {error}")
        return None


def _disk(folder: Path, size: int, notes: list[str], say: Say) -> DiskFigures | None:
    say(f"the disk, with {format_bytes(size)}")
    found = measure_disk_under(folder, size)
    if isinstance(found, DiskFigures):
        return found
    notes.append(f"no disk was measured: {found}")
    return None


def _keep(probe: Probe) -> str:
    """Keep it, unless it was disturbed and an earlier one was not; what was done."""
    earlier, _ = read_probe(probe.identity)
    if earlier is not None and _busy_share(probe) > MUCH >= _busy_share(earlier):
        return (
            f"not kept: the probe of {earlier.made[:10]}, when the machine was free, stays; probe "
            "again when it is"
        )
    try:
        return f"kept in {write_probe(probe)}; plans use it until the machine changes"
    except OSError as error:
        return f"not kept: {error.filename} cannot be written ({error.strerror})"


def _as_json(probe: Probe, hardware: Hardware) -> dict[str, Any]:
    """The probe, and who holds the memory of the devices now."""
    return {
        **ADAPTER.dump_python(probe, mode="json"),
        "ram_bytes": {
            "total": hardware.ram_total_bytes,
            "available": hardware.ram_available_bytes,
        },
        "devices": [
            {
                "uuid": card.uuid,
                "name": card.name,
                "total_bytes": card.total_bytes,
                "free_bytes": card.free_bytes,
                "processes": [dict(process.__dict__) for process in card.processes],
            }
            for card in hardware.accelerators
        ],
    }


@contextmanager
def _showing_progress() -> Iterator[Say]:
    """Inside, what is measured is on one line of stderr; nothing where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda said: None
        return
    with console.status("measuring") as status:
        yield lambda said: status.update(Text(f"measuring {said}"))
