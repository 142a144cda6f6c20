"""The rates of one rank by the probe of this machine, as far as it knows them.

A probe is of a machine with nothing else to do, and so are step times made of it; where others keep
the cores busy now, that is said and not reckoned with: a moment's figures have been seven times
apart on one machine, and nobody knows how busy it will be while the job trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tightfit.engine.host_threads import update_threads
from tightfit.facts.disk import DiskRate
from tightfit.facts.hardware import Hardware
from tightfit.facts.processors import cpu_quota, threads_of
from tightfit.planner.probe.figures import ByWidth, CardFigures, HostFigures, LinkFigures, Probe
from tightfit.planner.probe.kept import ADVICE, identity_of, read_probe
from tightfit.planner.rates import Collective, Link, Rates, interpolate

_LOOK_SECONDS = 0.1
MUCH = 0.25  # of the machine's processors, taken by others


@dataclass(frozen=True)
class RankShare:
    """What a rank computes with.

    Attributes:
        precision: of its products: `fp32`, `bf16` or `fp16`.
        ranks: that share the machine.
        threads: of each, where it computes on the CPU.
    """

    device: torch.device
    precision: str
    ranks: int
    threads: int


def threads_of_rank(ranks: int) -> int:
    """Threads of each rank that this process would start; its own where there is one rank."""
    now = torch.get_num_threads()
    if ranks == 1:
        return now
    return min(now, threads_of(0, ranks, os.sched_getaffinity(0), quota=cpu_quota()))


def probed_rates(hardware: Hardware, share: RankShare) -> tuple[Rates | None, str]:
    """What one rank has, and a sentence on where that comes from; None where no probe tells."""
    probe, reason = read_probe(identity_of(hardware))
    if probe is None:
        moment = "rates measured in a moment"
        if share.ranks > 1:
            moment += ", the link between ranks assumed"
        return None, f"{reason or moment}; {ADVICE}"
    rates = rates_of(probe, share, hardware)
    if rates is None:
        said = f"the probe knows nothing of {share.precision} products on this device"
        return None, f"{said}; {ADVICE}"
    return rates, f"rates of the probe of {probe.made[:10]}" + _disturbed(probe) + _busy_now(share)


def _disturbed(probe: Probe) -> str:
    """How much others took while it was made, where it is much."""
    busy = probe.busy_cores / probe.identity.processors
    if busy < MUCH:
        return ""
    return f", made while other processes kept {busy:.0%} of the processors busy: make a new one"


def _busy_now(share: RankShare) -> str:
    """What others take of the processors that the rank computes with, where it is much."""
    if share.device.type != "cpu":
        return ""
    busy = psutil.cpu_percent(_LOOK_SECONDS) / 100
    if busy < MUCH:
        return ""
    return (
        f"; other processes keep {busy:.0%} of the processors busy now, and steps take longer than "
        "predicted while they do"
    )


def probed_disk(hardware: Hardware, folder: Path) -> DiskRate | None:
    """Of the disk under `folder`, which exists; None where the probe was on another one."""
    probe, _ = read_probe(identity_of(hardware))
    if probe is None or probe.disk is None:
        return None
    known = probe.disk
    if (known.device, known.total_bytes) != disk_identity(folder):
        return None
    return DiskRate(known.read, known.write)


def disk_identity(folder: Path) -> tuple[int, int]:
    """By what the file system of a folder is known again: device number and size in bytes."""
    system = os.statvfs(folder)
    return folder.stat().st_dev, system.f_frsize * system.f_blocks


def rates_of(probe: Probe, share: RankShare, hardware: Hardware) -> Rates | None:
    """What one rank has by `probe`; None where it does not know the device or the precision."""
    if share.device.type == "cpu":
        return _on_cpu(probe, share)
    return _on_card(probe, share, hardware)


def _on_cpu(probe: Probe, share: RankShare) -> Rates:
    host = host_of_rank(probe, share.threads, share.ranks)
    return Rates(
        matmul_flops_per_second=_plateau(host.matmul),
        memory_bytes_per_second=host.memory,
        copy_bytes_per_second=host.copy,
        host_memory_bytes_per_second=2 * host.copy,
        device_optimizer_parameters_per_second=host.optimizer,
        host_optimizer_parameters_per_second=host.optimizer,
        operation_seconds=host.operation_seconds,
        matmul_by_width=tuple(sorted(host.matmul.items())),
        link=_link(probe.link, "gloo", share.ranks),
    )


def _on_card(probe: Probe, share: RankShare, hardware: Hardware) -> Rates | None:
    card = _card_figures(probe, share, hardware)
    products = None if card is None else card.matmul.get(share.precision)
    if card is None or not products:
        return None
    host = host_of_rank(probe, update_threads(share.device, probe.cores, share.ranks), share.ranks)
    return Rates(
        matmul_flops_per_second=_plateau(products),
        memory_bytes_per_second=card.memory,
        copy_bytes_per_second=min(card.copies.to_card, card.copies.to_host),
        host_memory_bytes_per_second=2 * host.copy,
        device_optimizer_parameters_per_second=card.optimizer,
        host_optimizer_parameters_per_second=host.optimizer,
        operation_seconds=card.operation_seconds,
        matmul_by_width=tuple(sorted(products.items())),
        link=_link(probe.link, "nccl", share.ranks),
    )


def _card_figures(probe: Probe, share: RankShare, hardware: Hardware) -> CardFigures | None:
    """Of the slowest card that the ranks use, in products: all wait for it."""
    used = [card.uuid for card in hardware.accelerators[: share.ranks]]
    known = [card for card in probe.cards if card.uuid in used and card.matmul.get(share.precision)]
    if len(known) < len(used):
        return None
    return min(known, key=lambda card: _plateau(card.matmul[share.precision]), default=None)


def _plateau(products: ByWidth) -> float:
    """The rate of the widest layers."""
    return products[max(products)]


def host_of_rank(probe: Probe, threads: int, ranks: int) -> HostFigures:
    """What each of `ranks` has of the CPU with so many threads while all compute.

    As it was measured with as many ranks at once; else no more than one process with so many
    threads, and no more than its part of what all cores together have been seen to do.
    """
    seen, seen_ranks = None, 0
    if probe.link is not None and probe.link.together is not None:
        seen, seen_ranks = probe.link.together, probe.link.ranks
        if (seen_ranks, seen.threads) == (ranks, threads):
            return seen

    def each(figure: Callable[[HostFigures], float]) -> float:
        known = _never_falling({host.threads: figure(host) for host in probe.host})
        alone = interpolate(known, threads, float)
        if ranks == 1:
            return alone
        machine = interpolate(known, min(probe.cores, threads * ranks), float)
        if seen is not None and seen_ranks * seen.threads <= threads * ranks:
            machine = max(machine, seen_ranks * figure(seen))
        return min(alone, machine / ranks)

    def products(width: int) -> Callable[[HostFigures], float]:
        return lambda host: interpolate(host.matmul, width)

    widths = {width for host in probe.host for width in host.matmul}
    known = {host.threads: host.operation_seconds for host in probe.host}
    return HostFigures(
        threads=threads,
        matmul={width: each(products(width)) for width in sorted(widths)},
        memory=each(lambda host: host.memory),
        copy=each(lambda host: host.copy),
        optimizer=each(lambda host: host.optimizer),
        operation_seconds=interpolate(known, threads, float),
    )


def _never_falling(known: dict[int, float]) -> dict[int, float]:
    """Rates by threads, each at least that of fewer threads: on a machine with nothing else to do
    more threads are not slower, but a probe may have been disturbed."""
    best, rising = 0.0, {}
    for count in sorted(known):
        best = rising[count] = max(best, known[count])
    return rising


def _link(figures: LinkFigures | None, backend: str, ranks: int) -> Link | None:
    """Between so many ranks of this machine. The rate is that of the link, whatever their number;
    in a ring of more ranks there are more hops to wait for."""
    if figures is None or figures.backend != backend or ranks == 1:
        return None
    hops = (ranks - 1) / (figures.ranks - 1)
    lines = {
        str(name): Collective(line.latency_seconds * hops, line.bytes_per_second)
        for name, line in figures.lines.items()
    }
    return Link(**lines)
