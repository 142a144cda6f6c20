"""The cards: figures that follow from others do, and names are found as people write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightfit.facts import presets as module
from tightfit.facts.presets import Card, Pcie, find_card, nearest_cards, presets
from tightfit.units import GIB

WANTED = {
    "rtx-3060", "rtx-3080", "rtx-3090", "rtx-4070-ti-super", "rtx-4080", "rtx-4090", "rtx-5070-ti",
    "rtx-5080", "rtx-5090", "rtx-4060-laptop", "rtx-4070-laptop", "rtx-a4000", "rtx-a4500",
    "rtx-a5000", "rtx-a5500", "rtx-a6000", "rtx-6000-ada", "rtx-pro-6000", "t4", "v100-16g",
    "v100-32g", "a10", "a100-40g", "a100-80g", "l4", "l40s", "h100", "h100-pcie", "h100-nvl",
    "h200", "b200", "mi250", "mi300x", "ascend-910b",
}  # fmt: skip

# Dense operations that one multiprocessor makes in a clock, adding up in fp32: the architectures'
# whitepapers. GeForce cards of the same chips have half of the tensor rates, but for int8.
GEFORCE = {"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "fp8": 1024, "int8": 2048}
PROFESSIONAL = {"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048, "int8": 2048}
PER_CLOCK = {
    "volta": {"fp32": 128, "fp16": 1024},
    "turing": {"fp32": 128, "fp16": 1024, "int8": 2048},
    "ga100": {"fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096},
    "hopper": {
        "fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192,
    },
    "blackwell": {"fp32": 256},  # the clock of its tensor cores is not published
    "cdna2": {"fp32": 256, "fp16": 1024, "bf16": 1024, "int8": 1024},
    "cdna3": {
        "fp32": 256, "tf32": 1024, "fp16": 2048, "bf16": 2048, "fp8": 4096, "int8": 4096,
    },
}  # fmt: skip


def per_clock(card: Card) -> dict[str, int]:
    if card.architecture in PER_CLOCK:
        return PER_CLOCK[card.architecture]
    return GEFORCE if card.kind == "consumer" else PROFESSIONAL


CARDS = pytest.mark.parametrize("card", presets(), ids=[card.key for card in presets()])
WITH_CHIP = [card for card in presets() if card.chip.multiprocessors]
CHIPS = pytest.mark.parametrize("card", WITH_CHIP, ids=[card.key for card in WITH_CHIP])


def test_every_card_that_was_asked_for_is_there() -> None:
    assert {card.key for card in presets()} == WANTED
    assert {card.key for card in presets()} - {card.key for card in WITH_CHIP} == {"ascend-910b"}


@CHIPS
def test_bandwidth_is_that_of_the_bus(card: Card) -> None:
    chip = card.chip
    assert chip.bus_bits is not None
    assert chip.gbit_per_pin is not None
    worked_out = chip.bus_bits * chip.gbit_per_pin * 1e9 / 8
    assert card.memory_bytes_per_second == pytest.approx(worked_out, rel=0.005)


@CHIPS
def test_matrix_rates_are_those_of_the_multiprocessors(card: Card) -> None:
    chip, rates = card.chip, per_clock(card)
    assert chip.multiprocessors is not None
    assert chip.boost_mhz is not None
    assert "fp32" in rates
    for precision, rate in card.flops_per_second.items():
        if precision not in rates:
            assert card.key == "b200"
            continue
        clock = chip.boost_mhz if precision == "fp32" else chip.tensor_mhz or chip.boost_mhz
        worked_out = chip.multiprocessors * rates[precision] * clock * 1e6
        assert rate == pytest.approx(worked_out, rel=0.015), precision


@CARDS
def test_a_card_is_plausible(card: Card) -> None:
    rates = card.flops_per_second
    assert rates["fp16"] == rates.get("bf16", rates["fp16"])
    assert rates["fp16"] >= rates.get("fp32", 0)
    assert 0.9 * card.memory_gib * GIB < card.usable_bytes < card.memory_gib * GIB
    assert card.pcie.lanes in (8, 16)
    assert card.name
    if card.capability is not None:
        major = card.capability[0]
        assert ("bf16" in rates) == (major >= 8)
        assert ("fp8" in rates) == (card.capability >= (8, 9))
    if card.fabric is not None:
        assert card.fabric.bytes_per_second > card.pcie.bytes_per_second


@CARDS
def test_figures_have_a_source_or_say_that_they_have_none(card: Card) -> None:
    assert card.sources or {"tflops", "gb_per_second"} <= set(card.unchecked)
    for source in card.sources:
        assert source[-4:].isdecimal(), f"{source} has no year"


def test_tables_have_no_field_that_nobody_reads() -> None:
    known = {
        "name", "architecture", "capability", "also", "memory_gib", "driver_mib", "torch_gib",
        "multiprocessors", "boost_mhz", "tensor_mhz", "bus_bits", "gbit_per_pin", "gb_per_second",
        "tflops", "pcie", "fabric", "sources", "unchecked", "note",
    }  # fmt: skip
    for path in Path(module.__file__).with_name("cards").glob("*.json"):
        for key, fields in json.loads(path.read_text()).items():
            assert set(fields) <= known, key
            assert set(fields.get("unchecked", ())) <= set(fields), key


def test_geforce_cards_add_up_in_fp32_at_half_rate() -> None:
    """The figures that are easily mistaken for others: added up in fp16, or sparse."""
    rates = {card.key: card.flops_per_second for card in presets()}
    assert rates["rtx-4090"]["fp16"] == 165.2e12, "not 330.3, which adds up in fp16"
    assert rates["rtx-3080"]["bf16"] == 59.5e12, "not 119"
    assert rates["rtx-5090"]["bf16"] == 209.5e12, "not 419"
    assert rates["rtx-a6000"]["bf16"] == 154.8e12, "not 309.7, which is sparse"
    assert rates["h100"]["bf16"] == 989.4e12, "not 1979, which is sparse"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("4090 24GB", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx-4060-laptop"),
        ("rtx_3080_10gb", "rtx-3080"),
        ("4070 ti super", "rtx-4070-ti-super"),
        ("a6000", "rtx-a6000"),
        ("6000 ada", "rtx-6000-ada"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("a100-80g", "a100-80g"),
        ("A100 80 GiB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Huawei Ascend 910B", "ascend-910b"),
    ],
)
def test_names_are_matched_loosely(name: str, key: str) -> None:
    found = find_card(name)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize("name", ["a100", "v100", "4080 super", "3080 12GB", "24GB", "", "a10g"])
def test_what_may_be_another_card_is_none(name: str) -> None:
    assert find_card(name) is None


def test_every_key_and_name_finds_its_own_card() -> None:
    for card in presets():
        assert find_card(card.key) is card
        assert find_card(card.name) is card


def test_the_nearest_names() -> None:
    assert nearest_cards("a100")[:2] == ["a100-40g", "a100-80g"]
    assert "rtx-4090" in nearest_cards("4091")
    assert nearest_cards("zzzz") == []
    assert nearest_cards("") == []


def test_a_link_has_the_rate_of_its_lanes() -> None:
    assert Pcie(4, 16).bytes_per_second == pytest.approx(31.5e9, rel=0.001)
    assert Pcie(3, 8).bytes_per_second == pytest.approx(7.88e9, rel=0.001)
    assert Pcie(4, 16).narrower(Pcie(5, 8)) == Pcie(4, 8)
