"""Where the thread runs that updates what is on the host."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tightfit.engine.host_threads import (
    prepare_update_thread,
    processors_near,
    update_threads,
)

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "processors", "ranks", "threads"),
    [(CPU, 64, 1, 1), (CARD, 16, 1, 15), (CARD, 64, 8, 7), (CARD, 4, 8, 1), (CARD, 1, 1, 1)],
)
def test_a_rank_has_its_share(
    device: torch.device, processors: int, ranks: int, threads: int
) -> None:
    assert update_threads(device, processors, ranks) == threads


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a card's files."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    folder = tmp_path / "0000:c1:02.0"
    folder.mkdir()
    return folder


def test_processors_near_a_card_are_those_of_its_node_that_may_be_used(card: Path) -> None:
    first = min(os.sched_getaffinity(0))
    (card / "local_cpulist").write_text(f"{first},5000-5003\n")
    assert processors_near(CARD, card.parent) == {first}


def test_nothing_is_near_where_nobody_tells(card: Path) -> None:
    assert processors_near(CARD, card.parent) == set()
    assert processors_near(CPU, card.parent) == set()


def test_only_the_thread_itself_is_bound() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def work() -> None:
        prepare_update_thread(CPU, 1)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]
    assert torch.get_num_threads() == before
