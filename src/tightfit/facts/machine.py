"""A machine, or several alike, that one does not sit at: from the keys that describe it.

Puts together what `machine_words.py` reads, what `presets.py` knows of the card and what
`reached.py` says that programs reach. Knows nothing about models, plans or the machine that this
runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.facts import reached
from tightfit.facts.disk import ASSUMED_DISK, DiskRate
from tightfit.facts.job import Job
from tightfit.facts.machine_words import (
    Interconnect,
    Nvme,
    parse_cards,
    parse_interconnect,
    parse_network,
    parse_nvme,
    parse_ram,
)
from tightfit.facts.presets import Card, Pcie
from tightfit.units import format_bytes

# Where `network` is not given; common on servers' boards.
_ASSUMED_NETWORK = "10Gb"


@dataclass(frozen=True)
class Link:
    """A link of a ring, as a collective sees it.

    Attributes:
        bytes_per_second: reached in one direction while the other one is busy too.
        latency_seconds: of one hop.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Machine:
    """`nodes` machines alike.

    Attributes:
        cards_per_node: those that the job uses.
        host_bytes: what jobs can have of a node's RAM; None where it is not given.
        nvme_bytes: of a node's disk; None where there is none.
        disk: its rates.
        pcie: what card and slot agree on.
        host_link_bytes_per_second: pinned copies between a card and its host, in one direction.
        cards: between neighbours in a node.
        has_fabric: whether that is a link of their own, and not PCIe.
        network: out of a node, all its adapters together; None of a single one.
        host_memory_bytes_per_second: reached by a node's processors together.
        notes: what was assumed or will not be used, one sentence each.
    """

    card: Card
    cards_per_node: int
    nodes: int
    host_bytes: int | None
    nvme_bytes: int | None
    disk: DiskRate
    pcie: Pcie
    host_link_bytes_per_second: float
    cards: Link
    has_fabric: bool
    network: Link | None
    host_memory_bytes_per_second: float
    notes: tuple[str, ...] = ()

    @property
    def host_optimizer_parameters_per_second(self) -> float:
        """AdamW in fp32 on a node's processors, all ranks together."""
        return self.host_memory_bytes_per_second / reached.OPTIMIZER_BYTES_PER_PARAMETER


def machine_of(job: Job) -> Machine | None:
    """The machine that a job describes; None where it is for the one that this runs on."""
    if job.gpu is None:
        return None
    card = parse_cards(job.gpu).card
    wanted = Interconnect(None, False)
    if job.interconnect is not None:
        wanted = parse_interconnect(job.interconnect)
    slot = wanted.pcie or card.pcie
    pcie = card.pcie.narrower(slot)
    has_fabric = _has_fabric(card, wanted, job.num_gpus)
    ram = None if job.ram is None else parse_ram(job.ram)
    nvme = None if job.nvme is None else parse_nvme(job.nvme)
    host_memory = ram.bytes_per_second if ram is not None else None
    if host_memory is None:
        host_memory = reached.assumed_host_memory(card, slot, job.num_gpus)
    return Machine(
        card=card,
        cards_per_node=job.num_gpus,
        nodes=job.nnodes,
        host_bytes=None if ram is None else reached.usable_ram(ram.total_bytes),
        nvme_bytes=None if nvme is None else nvme.total_bytes,
        disk=_disk_rate(nvme),
        pcie=pcie,
        host_link_bytes_per_second=reached.copy_bytes_per_second(pcie),
        cards=_between_cards(card, pcie, has_fabric),
        has_fabric=has_fabric,
        network=_network(job),
        host_memory_bytes_per_second=host_memory * reached.HOST_MEMORY_SHARE,
        notes=tuple(_notes(job, card, wanted, nvme)),
    )


def _has_fabric(card: Card, wanted: Interconnect, cards: int) -> bool:
    """Asked for; or built in, unless only PCIe was asked for. A bridge joins a pair only."""
    if card.fabric is None or cards > card.fabric.cards:
        return False
    return wanted.fabric or (card.fabric.built_in and wanted.pcie is None)


def _between_cards(card: Card, pcie: Pcie, has_fabric: bool) -> Link:
    if has_fabric:
        assert card.fabric is not None
        rate = card.fabric.bytes_per_second * reached.FABRIC_SHARE
        return Link(rate, reached.FABRIC_SECONDS)
    rate = reached.copy_bytes_per_second(pcie)
    if not card.peers_over_pcie:
        rate *= reached.THROUGH_HOST_SHARE
    return Link(rate, reached.PCIE_SECONDS)


def _network(job: Job) -> Link | None:
    if job.nnodes == 1:
        return None
    rate = parse_network(job.network or _ASSUMED_NETWORK)
    return Link(rate * reached.NETWORK_SHARE, reached.network_seconds(rate))


def _disk_rate(nvme: Nvme | None) -> DiskRate:
    """What is given; disks write a sustained stream at about half of their reading."""
    if nvme is None or nvme.read_bytes_per_second is None:
        return ASSUMED_DISK
    read = nvme.read_bytes_per_second
    half = ASSUMED_DISK.write_bytes_per_second / ASSUMED_DISK.read_bytes_per_second
    return DiskRate(read, nvme.write_bytes_per_second or read * half)


def _notes(job: Job, card: Card, wanted: Interconnect, nvme: Nvme | None) -> Iterator[str]:
    if card.note:
        yield f"{card.name}: {card.note}"
    if card.capability is None:
        yield (
            f"{card.name}: kernels and runtime are those of an NVIDIA card (Ampere); nothing was "
            "measured on others"
        )
    if wanted.pcie is not None and wanted.pcie.narrower(card.pcie) != wanted.pcie:
        yield f"{card.name} is {card.pcie}: {wanted.pcie} runs at {wanted.pcie.narrower(card.pcie)}"
    if job.ram is None and job.host_memory_limit == "auto":
        yield "ram is not given: the host's memory counts as without limit"
    if nvme is not None and nvme.read_bytes_per_second is None:
        yield f"nvme has no rate: {_rates(ASSUMED_DISK)} are assumed; give it like 1TB@3.5GB/s"
    elif nvme is not None and nvme.write_bytes_per_second is None:
        yield f"nvme: {_rates(_disk_rate(nvme))}; what is written is assumed from what is read"
    if job.nnodes > 1 and job.network is None:
        yield f"network is not given: {_ASSUMED_NETWORK} between machines is assumed"


def _rates(disk: DiskRate) -> str:
    read, write = disk.read_bytes_per_second / 1e9, disk.write_bytes_per_second / 1e9
    return f"{read:.1f} GB/s read and {write:.1f} GB/s written"


def describe_machine(machine: Machine) -> list[str]:
    """The machine in a few lines for people: what it is, and the rates that are reckoned with."""
    card, count = machine.card, machine.cards_per_node
    where = f", {machine.nodes} machines" if machine.nodes > 1 else ""
    lines = [
        f"Described: {count} x {card.name}{where}, {format_bytes(card.usable_bytes)} usable each",
        f"Links: {machine.pcie} to the host {_gb(machine.host_link_bytes_per_second)}",
    ]
    if count > 1:
        way = card.fabric.name if machine.has_fabric and card.fabric else "PCIe"
        if not (machine.has_fabric or card.peers_over_pcie):
            way = "PCIe and the host's memory"
        lines[-1] += f", between cards {_gb(machine.cards.bytes_per_second)} over {way}"
    if machine.network is not None:
        lines[-1] += f", between machines {_gb(machine.network.bytes_per_second)}"
    ram = "RAM without limit" if machine.host_bytes is None else _ram(machine.host_bytes)
    lines.append(
        f"Host: {ram}, {_gb(machine.host_memory_bytes_per_second)}, AdamW at "
        f"{machine.host_optimizer_parameters_per_second / 1e9:.1f} G parameters/s"
    )
    if machine.nvme_bytes is not None:
        lines.append(f"Disk: {format_bytes(machine.nvme_bytes)}, {_rates(machine.disk)}")
    return lines


def _ram(usable: int) -> str:
    return f"{format_bytes(usable)} of RAM usable"


def _gb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
