"""Cards are those that torch can use, whoever saw them first."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.facts.hardware import Accelerator, Hardware
from tightfit.planner import machine
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.units import GIB

CARD = Accelerator(3, "seen by the library", 24 * GIB, 20 * GIB)


def found(
    monkeypatch: pytest.MonkeyPatch, hardware: Hardware, *, seen: bool, usable: bool
) -> Hardware:
    detected = replace(hardware, accelerators=(CARD,) if seen else ())
    monkeypatch.setattr(machine, "detect_hardware", lambda folder: detected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "seen by torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    return machine.usable_hardware(Path())


@pytest.mark.parametrize("seen", [True, False])
def test_a_card_that_torch_cannot_use_is_none(
    monkeypatch: pytest.MonkeyPatch, hardware: Hardware, seen: bool
) -> None:
    assert found(monkeypatch, hardware, seen=seen, usable=False).device_kind == "cpu"


def test_a_card_is_as_the_library_describes_it(
    monkeypatch: pytest.MonkeyPatch, hardware: Hardware
) -> None:
    assert found(monkeypatch, hardware, seen=True, usable=True).accelerators == (CARD,)


def test_a_card_that_only_torch_sees_is_used(
    monkeypatch: pytest.MonkeyPatch, hardware: Hardware
) -> None:
    """What this process holds already is not lost to the job."""
    here = found(monkeypatch, hardware, seen=False, usable=True)
    (card,) = here.accelerators
    assert (card.name, card.total_bytes, card.free_bytes) == ("seen by torch", 10 * GIB, 7 * GIB)
    assert card.capability == (8, 9)
    assert [process.pid for process in card.processes] == [os.getpid()]
    assert here.device_total_bytes == 8 * GIB
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert machine.device_of(here) == torch.device("cuda", 2)


@pytest.mark.parametrize(
    ("limits", "missing"),
    [
        (Limits(device_bytes=60, ranks=2), 0),  # each has a device of its own
        (Limits(host_bytes=15, ranks=2), 5),
        (Limits(shared_bytes=100, ranks=2), 40),  # on a CPU all is in one RAM
    ],
)
def test_what_ranks_of_a_machine_share(limits: Limits, missing: int) -> None:
    kinds = {Tier.DEVICE: {Kind.PARAMETERS: 60}, Tier.HOST: {Kind.BUFFERS: 10}}
    bill = MemoryTable({Phase.FORWARD: kinds})
    assert limits.missing_bytes(bill) == missing
