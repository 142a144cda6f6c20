"""How people write a machine down: `2xrtx-4090`, `64GiB@80GB/s`, `1TB@3.5GB/s`, `pcie4x8`, `25Gb`.

Reads one value at a time; how they go together is `machine.py`'s business. Every error is a
ValueError whose text says what was written and what would be accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tightfit.facts.presets import Card, Pcie, find_card, nearest_cards
from tightfit.units import GIB, TIB, parse_bytes

_MOST_CARDS = 2**16
# What no machine of the next years reaches: whoever writes more means another unit. In 2026 large
# servers have 32 TiB of RAM and 6.4 Tb/s of network (8 adapters of 800 Gb/s), two sockets read
# about 1.5 TB/s, a disk holds up to 250 TB and on PCIe 6 reads 28 GB/s.
MOST_RAM_BYTES = 64 * TIB
_MOST_DISK_BYTES = 1024 * TIB
_MOST_RAM_RATE = 10e12  # bytes per second, as the two below
_MOST_DISK_RATE = 100e9
MOST_NETWORK_RATE = 20e12 / 8
_COUNTED = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*[x×*]\s*(.+)", re.IGNORECASE)
_PCIE = re.compile(r"pcie[\s-]*(?:gen[\s-]*)?([3-5])(?:\.0)?(?:[\s-]*x\s*(\d+))?", re.IGNORECASE)
_LANES = (1, 2, 4, 8, 16)
_NETWORK = re.compile(
    r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([kmgt])(b|bit|be|bps|b/s|bit/s|B/s)?",
)
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Cards:
    """What `gpu` says: the card, and how many a machine has; None where that is not said."""

    card: Card
    count: int | None


@dataclass(frozen=True)
class Ram:
    """What `ram` says: all of it, and the rate of its modules where that is said."""

    total_bytes: int
    bytes_per_second: float | None


@dataclass(frozen=True)
class Nvme:
    """What `nvme` says: the disk's size, and its rates where they are said."""

    total_bytes: int
    read_bytes_per_second: float | None
    write_bytes_per_second: float | None


@dataclass(frozen=True)
class Interconnect:
    """What `interconnect` says: how wide the slots are, and whether cards have their own link;
    None where that is not said."""

    pcie: Pcie | None
    fabric: bool


def parse_cards(text: str) -> Cards:
    """Cards of `"2xrtx-4090"`, `"RTX 4090"` or `"8 x A100-80G"`.

    Raises:
        ValueError: nobody knows the card, or there cannot be so many.
    """
    counted = _COUNTED.fullmatch(text.strip())
    name = counted[2] if counted else text
    return Cards(_known_card(name.strip()), _count(counted[1], text) if counted else None)


def _count(number: str, text: str) -> int:
    if not number.isdecimal() or not 0 < int(number) <= _MOST_CARDS:
        raise ValueError(
            f"{text!r} has {number} cards; give a whole number from 1 to {_MOST_CARDS}, "
            "like 2xrtx-4090"
        )
    return int(number)


def _known_card(name: str) -> Card:
    card = find_card(name)
    if card is not None:
        return card
    if re.search(r"[,+;]", name):
        raise ValueError(f"{name!r} is several kinds of cards; give one, like 2xrtx-4090")
    nearest = nearest_cards(name)
    known = f"the nearest are {', '.join(nearest)}; " if nearest else ""
    raise ValueError(
        f"{name!r} is no card that tightfit knows; {known}`tightfit presets` lists them"
    )


def parse_ram(text: str) -> Ram:
    """RAM of `"64GiB"` or `"64GiB@80GB/s"`.

    Raises:
        ValueError: no size, no rate, or less than any machine has.
    """
    size, _, rate = text.partition("@")
    return Ram(
        _size("RAM", size, text, least=4 * GIB, most=MOST_RAM_BYTES),
        _rate("RAM", rate, text, _MOST_RAM_RATE) if "@" in text else None,
    )


def parse_nvme(text: str) -> Nvme:
    """A disk of `"1TB"`, `"1TB@3.5GB/s"` (read) or `"1TB@3.5GB/s:1.7GB/s"` (read and written).

    Raises:
        ValueError: no size, no rate, or less than any disk has.
    """
    size, _, rates = text.partition("@")
    read, _, write = rates.partition(":")
    return Nvme(
        _size("disk", size, text, least=GIB, most=_MOST_DISK_BYTES),
        _rate("disk", read, text, _MOST_DISK_RATE) if "@" in text else None,
        _rate("disk", write, text, _MOST_DISK_RATE) if ":" in rates else None,
    )


def _size(what: str, size: str, text: str, *, least: int, most: int) -> int:
    count = parse_bytes(size)
    if count < least:
        raise ValueError(
            f"{text} is less than {least // GIB} GiB of {what}; write a unit, like 64GiB"
        )
    if count > most:
        raise _impossible(text, size, f"{most // TIB} TiB of {what}")
    return count


def _impossible(text: str, figure: str, most: str) -> ValueError:
    return ValueError(
        f"{text!r}: {figure.strip()} is beyond every machine; none has more than {most}. Is its "
        "unit the one that you mean?"
    )


def _rate(what: str, rate: str, text: str, most: float) -> float:
    """Bytes a second of `3.5GB/s`, `3500MB/s` or `3.5GB`."""
    size = re.sub(r"(/s|ps)$", "", rate.strip(), flags=re.IGNORECASE)
    try:
        count = parse_bytes(size)
    except ValueError:
        count = 0
    if not re.search(r"[a-z]", size, re.IGNORECASE) or count < 10**6:
        raise ValueError(
            f"{text!r}: {rate!r} is not a rate of at least 1MB/s; write it like 3.5GB/s"
        )
    if count > most:
        raise _impossible(text, rate, f"{most / 1e9:,.0f} GB/s of {what}")
    return float(count)


def parse_interconnect(text: str) -> Interconnect:
    """Links of `"pcie4"`, `"pcie4x8"`, `"PCIe 5.0 x16"` or `"nvlink"`; `"nvlink,pcie4x8"` is both.

    Raises:
        ValueError: it is none of these.
    """
    pcie, fabric = None, False
    for word in re.split(r"[,+]", text):
        match = _PCIE.fullmatch(word.strip())
        lanes = 16 if match is None or match[2] is None else int(match[2])
        if word.strip().casefold() in ("nvlink", "fabric", "xgmi"):
            fabric = True
        elif match is not None and lanes in _LANES and pcie is None:
            pcie = Pcie(int(match[1]), lanes)
        else:
            raise ValueError(
                f"{text!r} is no interconnect; give pcie3, pcie4 or pcie5, with lanes like pcie4x8 "
                "where they are not 16, or nvlink"
            )
    return Interconnect(pcie, fabric)


def parse_network(text: str) -> float:
    """Bytes a second of `"25Gb"`, `"100GbE"`, `"8x400Gb"` (all of a machine's adapters), which are
    bits, or of `"3GB/s"`, which are bytes.

    Raises:
        ValueError: no rate, or one that may be either.
    """
    # Only `B` tells bytes from bits; everything else in either case.
    stripped = re.sub(r"[^B]", lambda match: match[0].lower(), text.strip())
    match = _NETWORK.fullmatch(stripped)
    total = 0.0
    if match is not None:
        total = float(match[1] or 1) * float(match[2]) * _PREFIXES[match[3]]
    if match is None or total == 0:
        raise ValueError(
            f"{text!r} is no rate of a network; write bits like 25Gb or 8x400Gb, or bytes like "
            "3GB/s"
        )
    rate = total if "B" in (match[4] or "") else total / 8
    if rate > MOST_NETWORK_RATE:
        raise _impossible(text, text, f"{MOST_NETWORK_RATE * 8 / 1e12:.0f} Tb/s of network")
    return rate
