"""Well-known cards for planning without one, looked up by name.

`cards/*.json` hold what the makers publish of each card. Matrix rates are dense ones (never "with
sparsity") that add up in fp32, as torch's products do: GeForce cards run fp16 at half of the rate
that is printed for adding up in fp16. Knows nothing about machines, or about what a program really
reaches; that is `reached.py`'s business.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tightfit.units import GIB, MIB

Kind = Literal["consumer", "workstation", "datacentre"]

_FOLDER = Path(__file__).with_name("cards")
_KINDS: tuple[Kind, ...] = ("consumer", "workstation", "datacentre")

# Documents that many cards share.
_DOCUMENTS = {
    "ga100": "NVIDIA A100 Tensor Core GPU architecture whitepaper, 2020",
    "ga102": "NVIDIA Ampere GA102 GPU architecture whitepaper, V2.0, 2021",
    "ada": "NVIDIA Ada GPU architecture whitepaper, V2.01, 2023",
    "hopper": "NVIDIA H100 Tensor Core GPU architecture whitepaper, 2022",
    "rtx-blackwell": "NVIDIA RTX Blackwell GPU architecture whitepaper, 2025",
}

# Words of a name that tell no card from another.
_NOISE = {
    "nvidia", "geforce", "rtx", "tesla", "quadro", "amd", "instinct", "radeon", "huawei", "gpu",
}  # fmt: skip

# What torch sees of the memory that the driver reports: from 0.972 (RTX 5080 Laptop, 15.471 GiB of
# 16303 MiB) to 0.993 (H100, 79.097 GiB of 81559 MiB); the least, where nobody has published it.
_LEAST_SEEN_BY_TORCH = 0.972


@dataclass(frozen=True)
class Pcie:
    """A PCI Express link."""

    generation: int
    lanes: int

    @property
    def bytes_per_second(self) -> float:
        """One direction, before packets' headers: 128 of 130 bits are data.

        Raises:
            KeyError: no rate is known for the generation.
        """
        return {3: 8e9, 4: 16e9, 5: 32e9}[self.generation] * 128 / 130 / 8 * self.lanes

    def narrower(self, other: Pcie) -> Pcie:
        """What a card and a slot agree on."""
        return Pcie(min(self.generation, other.generation), min(self.lanes, other.lanes))

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"


@dataclass(frozen=True)
class Fabric:
    """A link between cards beside PCIe.

    Attributes:
        bytes_per_second: of one card, in one direction.
        cards: most that it joins.
        built_in: whether machines have it; a bridge is bought apart.
    """

    name: str
    bytes_per_second: float
    cards: int
    built_in: bool


@dataclass(frozen=True)
class Chip:
    """Published figures that others follow from; None where they are not published.

    Attributes:
        multiprocessors: streaming multiprocessors, or AMD's compute units.
        tensor_mhz: the clock of matrix rates, where it is another one.
        gbit_per_pin: data rate of the memory.
    """

    multiprocessors: int | None
    boost_mhz: float | None
    tensor_mhz: float | None
    bus_bits: int | None
    gbit_per_pin: float | None


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        key: as `gpu` takes it.
        capability: CUDA's compute capability; None of other makers' cards.
        memory_gib: as it is sold.
        usable_bytes: what torch can have of it; a display takes of that.
        flops_per_second: dense, by type: `fp32` of ordinary cores (torch's default), `tf32`, `fp16`
            and `bf16` adding up in fp32, `fp8`, `int8` (operations).
        sources: documents, by title and year.
        unchecked: fields of the table that were typed from memory and compared with no text.
    """

    key: str
    name: str
    kind: Kind
    architecture: str
    capability: tuple[int, int] | None
    memory_gib: float
    usable_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    pcie: Pcie
    fabric: Fabric | None
    chip: Chip
    sources: tuple[str, ...]
    unchecked: tuple[str, ...]
    note: str | None

    @property
    def peers_over_pcie(self) -> bool:
        """Whether cards read each other's memory over PCIe; drivers of GeForce cards forbid it."""
        return self.kind != "consumer"


_CHIP = ("multiprocessors", "boost_mhz", "tensor_mhz", "bus_bits", "gbit_per_pin")


def _card(key: str, kind: Kind, fields: Mapping[str, Any]) -> Card:
    capability = fields["capability"]
    return Card(
        key=key,
        name=fields["name"],
        kind=kind,
        architecture=fields["architecture"],
        capability=None if capability is None else (capability[0], capability[1]),
        memory_gib=fields["memory_gib"],
        usable_bytes=_usable_bytes(fields),
        memory_bytes_per_second=fields["gb_per_second"] * 1e9,
        flops_per_second={name: rate * 1e12 for name, rate in fields["tflops"].items()},
        pcie=Pcie(*fields["pcie"]),
        fabric=_fabric(fields.get("fabric")),
        chip=Chip(*(fields.get(name) for name in _CHIP)),
        sources=tuple(_DOCUMENTS.get(source, source) for source in fields["sources"]),
        unchecked=tuple(fields.get("unchecked", ())),
        note=fields.get("note"),
    )


def _fabric(fields: Mapping[str, Any] | None) -> Fabric | None:
    if fields is None:
        return None
    rate = fields["gb_per_second"] * 1e9
    return Fabric(fields["name"], rate, fields["cards"], fields["built_in"])


def _usable_bytes(fields: Mapping[str, Any]) -> int:
    seen_by_torch: float | None = fields.get("torch_gib")
    if seen_by_torch is not None:
        return round(seen_by_torch * GIB)
    seen_by_driver: float = fields["driver_mib"]
    return round(seen_by_driver * _LEAST_SEEN_BY_TORCH * MIB)


@cache
def _tables() -> dict[str, tuple[Kind, dict[str, Any]]]:
    """Every entry by its key, in the order of the tables."""
    entries: dict[str, tuple[Kind, dict[str, Any]]] = {}
    for kind in _KINDS:
        table = json.loads((_FOLDER / f"{kind}.json").read_text(encoding="utf-8"))
        entries |= {key: (kind, fields) for key, fields in table.items()}
    return entries


@cache
def presets() -> tuple[Card, ...]:
    """Every card: consumer, workstation, datacentre."""
    return tuple(_card(key, kind, fields) for key, (kind, fields) in _tables().items())


@cache
def _by_folded_name() -> dict[str, Card]:
    cards = {card.key: card for card in presets()}
    names: dict[str, Card] = {}
    for key, (_, fields) in _tables().items():
        for name in (key, fields["name"], *fields.get("also", ())):
            names.setdefault(_folded(name), cards[key])
            names.setdefault(f"{_folded(name)}{fields['memory_gib']}", cards[key])
    return names


def _folded(name: str) -> str:
    """What tells a card from others: lower case, without makers and punctuation, `80gb` as `80g`.

    The memory's size goes with the number before it, wherever it is written: `a100 80gb sxm4`.
    """
    words = re.findall(r"\d+(?=\s*g(?:i?b)?\b)|[a-z0-9]+", name.casefold())
    words = [word for word in words if word not in {*_NOISE, "g", "gb", "gib"}]
    joined = "".join(words)
    for noise in sorted(_NOISE):
        joined = joined.removeprefix(noise)
    return joined


def find_card(name: str) -> Card | None:
    """The card of a name as people and drivers write it: `4090`, `RTX 4090`, `a100-80g`,
    `NVIDIA A100-SXM4-80GB`."""
    return _by_folded_name().get(_folded(name))


def nearest_cards(name: str, count: int = 3) -> list[str]:
    """The keys of the cards whose names are most like `name`; none when nothing is."""
    folded, known = _folded(name), _by_folded_name()
    longer = [other for other in known if folded and other.startswith(folded)]
    alike = difflib.get_close_matches(folded, known, n=2 * count, cutoff=0.5)
    return list(dict.fromkeys(known[other].key for other in (*longer, *alike)))[:count]
