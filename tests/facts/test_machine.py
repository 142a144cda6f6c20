"""A described machine: what the keys say, and what is assumed where they do not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tightfit.facts.disk import ASSUMED_DISK, DiskRate
from tightfit.facts.job import Job
from tightfit.facts.machine import Machine, describe_machine, machine_of
from tightfit.facts.presets import Pcie, presets
from tightfit.units import GIB


def machine(**keys: Any) -> Machine:
    found = machine_of(Job(model_name_or_path="m", **keys))
    assert found is not None
    return found


def test_without_a_card_it_is_the_machine_at_hand() -> None:
    assert machine_of(Job(model_name_or_path="m", num_gpus=2)) is None


def test_a_machine_in_full() -> None:
    found = machine(gpu="2xrtx-4090", ram="64GiB", nvme="1TB@3.5GB/s:1.7GB/s")
    assert (found.card.key, found.cards_per_node, found.nodes) == ("rtx-4090", 2, 1)
    assert found.host_bytes == 61 * GIB
    assert (found.nvme_bytes, found.disk) == (10**12, DiskRate(3.5e9, 1.7e9))
    assert found.pcie == Pcie(4, 16)
    assert found.host_link_bytes_per_second == pytest.approx(25.2e9, rel=0.01)
    assert found.network is None
    assert found.notes == ()


def test_cards_that_cannot_read_each_other_send_through_the_host() -> None:
    consumer, workstation = machine(gpu="2x4090"), machine(gpu="2x6000-ada")
    assert not consumer.has_fabric
    through_host = consumer.cards.bytes_per_second
    assert workstation.cards.bytes_per_second == pytest.approx(2 * through_host)
    assert "PCIe and the host's memory" in "\n".join(describe_machine(consumer))
    assert "over PCIe" in "\n".join(describe_machine(workstation))


@pytest.mark.parametrize(
    ("keys", "fabric", "gb_per_second"),
    [
        ({"gpu": "8xh100"}, True, 351),  # built in
        ({"gpu": "8xh100", "interconnect": "pcie5"}, False, 54),  # only PCIe was asked for
        ({"gpu": "8xh100", "interconnect": "nvlink,pcie5"}, True, 351),
        ({"gpu": "2x3090"}, False, 12.6),  # a bridge is bought apart
        ({"gpu": "2x3090", "interconnect": "nvlink"}, True, 43.9),
        ({"gpu": "4x3090"}, False, 12.6),
        ({"gpu": "2x4090", "interconnect": "pcie4x8"}, False, 6.3),
    ],
)
def test_what_joins_cards(keys: dict[str, Any], fabric: bool, gb_per_second: float) -> None:
    found = machine(**keys)
    assert found.has_fabric is fabric
    assert found.cards.bytes_per_second / 1e9 == pytest.approx(gb_per_second, rel=0.02)
    assert 1e-6 < found.cards.latency_seconds < 1e-4


def test_a_slot_and_a_card_agree_on_what_both_can() -> None:
    found = machine(gpu="4090", interconnect="pcie5x8", ram="32GiB")
    assert found.pcie == Pcie(4, 8)
    assert found.notes == ("GeForce RTX 4090 is PCIe 4 x16: PCIe 5 x8 runs at PCIe 4 x8",)
    older = machine(gpu="4090", interconnect="pcie4", ram="32GiB")
    assert found.host_memory_bytes_per_second > older.host_memory_bytes_per_second


def test_what_was_not_said_is_assumed_and_noted() -> None:
    found = machine(gpu="4090", nvme="1TB", nnodes=2)
    assert found.host_bytes is None
    assert found.disk == ASSUMED_DISK
    assert found.network is not None
    assert found.network.bytes_per_second == pytest.approx(0.9 * 10e9 / 8)
    said = "\n".join(found.notes)
    assert re.search(r"ram is not given", said)
    assert re.search(r"nvme has no rate: 3\.5 GB/s read and 1\.7 GB/s written are assumed", said)
    assert re.search(r"network is not given: 10Gb", said)


def test_a_disk_writes_at_half_of_its_reading_unless_it_is_said() -> None:
    found = machine(gpu="4090", ram="32GiB", nvme="1TB@7GB/s")
    assert found.disk == DiskRate(7e9, pytest.approx(3.4e9))
    assert "what is written is assumed" in found.notes[0]


def test_clusters() -> None:
    found = machine(gpu="8xh100", nnodes=4, network="8x400Gb", ram="2TB")
    assert (found.nodes, found.cards_per_node) == (4, 8)
    assert found.network is not None
    assert found.network.bytes_per_second == pytest.approx(0.9 * 400e9)
    assert found.cards.latency_seconds < found.network.latency_seconds
    assert "4 machines" in describe_machine(found)[0]
    slow = machine(gpu="4090", nnodes=2, network="25Gb").network
    assert slow is not None
    assert slow.latency_seconds > found.network.latency_seconds


def test_the_hosts_memory_may_be_described() -> None:
    found = machine(gpu="4090", ram="64GiB@100GB/s")
    assert found.host_memory_bytes_per_second == pytest.approx(75e9)
    assert found.host_optimizer_parameters_per_second == pytest.approx(75e9 / 28)


def test_fewer_cards_than_there_are_may_be_used() -> None:
    assert machine(gpu="8xh100", num_gpus=2).cards_per_node == 2


def test_every_card_makes_a_machine() -> None:
    for card in presets():
        found = machine(gpu=f"2x{card.key}", ram="64GiB")
        assert 0 < found.host_link_bytes_per_second < found.pcie.bytes_per_second
        assert len(describe_machine(found)) == 3
        assert any(card.name in note for note in found.notes) == bool(
            card.note or card.capability is None
        )
