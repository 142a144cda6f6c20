"""What is reached is less than what is published, for every card."""

from __future__ import annotations

import pytest

from tightfit.facts import reached
from tightfit.facts.presets import Pcie, find_card, presets
from tightfit.units import GIB


def test_products_reach_a_part_of_every_rate() -> None:
    for card in presets():
        for precision, nominal in card.flops_per_second.items():
            found = reached.product_flops_per_second(card, precision)
            assert found is not None
            assert 0.5 * nominal < found < nominal
        assert reached.product_flops_per_second(card, "fp64") is None


@pytest.mark.parametrize(("generation", "measured"), [(3, 12.0e9), (4, 25.5e9), (5, 56.3e9)])
def test_copies_are_near_what_was_measured_and_not_above(generation: int, measured: float) -> None:
    found = reached.copy_bytes_per_second(Pcie(generation, 16))
    assert 0.95 * measured < found <= measured
    assert reached.copy_bytes_per_second(Pcie(generation, 8)) == pytest.approx(found / 2)


def test_hosts_grow_with_their_cards() -> None:
    consumer, server = find_card("4090"), find_card("h100")
    assert consumer is not None
    assert server is not None
    assert reached.assumed_host_memory(consumer, Pcie(4, 16), 1) == 51.2e9
    one = reached.assumed_host_memory(server, server.pcie, 4)
    assert reached.assumed_host_memory(server, server.pcie, 8) == 2 * one


def test_a_job_cannot_have_all_of_the_ram() -> None:
    assert reached.usable_ram(64 * GIB) == 61 * GIB
    assert reached.usable_ram(4 * GIB) > 0


def test_slow_networks_have_no_rdma() -> None:
    assert reached.network_seconds(25e9 / 8) > reached.network_seconds(100e9 / 8)
