"""What people write of a machine is understood, or refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.facts.machine_words import (
    Interconnect,
    Nvme,
    Ram,
    parse_cards,
    parse_interconnect,
    parse_network,
    parse_nvme,
    parse_ram,
)
from tightfit.facts.presets import Pcie
from tightfit.units import GIB, TIB

PARSERS: tuple[Callable[[str], object], ...] = (
    parse_cards, parse_ram, parse_nvme, parse_interconnect, parse_network,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "count"),
    [
        ("2xrtx-4090", "rtx-4090", 2),
        ("8 x A100-80G", "a100-80g", 8),
        ("2×4090", "rtx-4090", 2),
        ("16*h100", "h100", 16),
        ("RTX 4090", "rtx-4090", None),
    ],
)
def test_cards(text: str, key: str, count: int | None) -> None:
    found = parse_cards(text)
    assert (found.card.key, found.count) == (key, count)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0x4090", "'0x4090' has 0 cards; give a whole number from 1 to 65536"),
        ("-1x4090", "has -1 cards"),
        ("1.5x4090", "has 1.5 cards"),
        ("70000x4090", "has 70000 cards"),
        ("2xa100", "'a100' is no card that tightfit knows; the nearest are a100-40g, a100-80g"),
        ("zzzz", "`tightfit presets` lists them"),
        ("1x4090,1x3090", "is several kinds of cards; give one"),
        ("", "is no card"),
    ],
)
def test_cards_that_there_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_cards(text)


def test_ram_and_nvme() -> None:
    assert parse_ram("64GiB") == Ram(64 * GIB, None)
    assert parse_ram("64GB@80GB/s") == Ram(64 * 10**9, 80e9)
    assert parse_nvme("1TB") == Nvme(10**12, None, None)
    assert parse_nvme("1TB@3.5GB/s") == Nvme(10**12, 3.5e9, None)
    assert parse_nvme("2TB@7000MB/s:5GBps") == Nvme(2 * 10**12, 7e9, 5e9)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_ram, "64", "64 is less than 4 GiB of RAM; write a unit, like 64GiB"),
        (parse_ram, "-1GiB", "'-1GiB' is not a size"),
        (parse_ram, "64GiB@", "'' is not a rate"),
        (parse_ram, "64GiB@80", "'80' is not a rate"),
        (parse_ram, "9" * 400 + "GiB", "is more than there is anywhere"),
        (parse_nvme, "0TB", "0TB is less than 1 GiB of disk"),
        (parse_nvme, "1TB@fast", "'fast' is not a rate"),
        (parse_nvme, "1TB@3GB/s:", "'' is not a rate"),
    ],
)
def test_no_memory(parse: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (
            parse_nvme,
            "900000TB@900TB/s",
            "900000TB is beyond every machine; none has more",
        ),
        (parse_nvme, "1TB@3.5TB/s", "3.5TB/s is beyond every machine; none has more than 100 GB/s"),
        (parse_nvme, "1TB@3.5GB/s:3.5TB/s", "3.5TB/s is beyond"),
        (parse_ram, "900TiB@900TB/s", "900TiB is beyond every machine; none has more than 64 TiB"),
        (parse_ram, "64GiB@900TB/s", "900TB/s is beyond every machine; none has more than 10,000"),
        (parse_network, "900000Gb", "none has more than 20 Tb/s of network. Is its unit the one"),
        (parse_network, "9" * 400 + "x25Gb", "is beyond every machine"),
    ],
)
def test_what_no_machine_has(parse: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(text)


def test_what_the_largest_machines_have() -> None:
    assert parse_ram("64TiB@10TB/s") == Ram(64 * TIB, 10e12)
    assert parse_nvme("1000TB@100GB/s") == Nvme(10**15, 100e9, None)
    assert parse_network("25x800Gb") == 20e12 / 8


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pcie4", Interconnect(Pcie(4, 16), False)),
        ("pcie4x8", Interconnect(Pcie(4, 8), False)),
        ("PCIe 5.0 x16", Interconnect(Pcie(5, 16), False)),
        ("pcie gen3 x4", Interconnect(Pcie(3, 4), False)),
        ("nvlink", Interconnect(None, True)),
        ("nvlink,pcie4x8", Interconnect(Pcie(4, 8), True)),
    ],
)
def test_interconnect(text: str, found: Interconnect) -> None:
    assert parse_interconnect(text) == found


@pytest.mark.parametrize("text", ["pcie6", "pcie4x3", "pcie", "usb", "", "pcie4,pcie5"])
def test_no_interconnect(text: str) -> None:
    with pytest.raises(ValueError, match="is no interconnect; give pcie3, pcie4 or pcie5"):
        parse_interconnect(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gb", 25e9 / 8),
        ("25gb", 25e9 / 8),
        ("25Gbps", 25e9 / 8),
        ("25 Gbit/s", 25e9 / 8),
        ("100GbE", 100e9 / 8),
        ("400G", 400e9 / 8),
        ("8x400Gb", 400e9),
        ("3GB/s", 3e9),
    ],
)
def test_network(text: str, rate: float) -> None:
    """Networks are sold in bits: only a capital B a second is a byte."""
    assert parse_network(text) == rate


@pytest.mark.parametrize("text", ["25GB", "25", "0Gb", "-25Gb", "0x25Gb", "fast", ""])
def test_no_network(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate of a network; write bits like 25Gb"):
        parse_network(text)


WORDS = st.text("0123456789.-+xX*@:,/ GMTgmbBisp", max_size=14) | st.text(max_size=10)


@given(WORDS, st.sampled_from(PARSERS))
def test_any_text_is_understood_or_refused(text: str, parse: Callable[[str], object]) -> None:
    """Nothing but ValueError, which is said in words, ever comes out."""
    with suppress(ValueError):
        assert parse(text)
