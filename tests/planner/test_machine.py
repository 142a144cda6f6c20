"""Cards are those that torch can use, whoever saw them first."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.planner.conftest import make_job

from tightfit.bill.runtime import Link
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.errors import ConfigError
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


FULL = {"gpu": "2x4090", "ram": "64GiB", "nvme": "1TB", "train_batch_size": "auto"}


def test_limits_are_the_described_machines(hardware: Hardware) -> None:
    job = make_job(**FULL)
    card = machine.card_to_plan_for(job, hardware)
    assert card == (8, 9)
    limits = machine.limits_of(job, hardware, card)
    assert limits.device_bytes == round(23.51 * GIB)
    assert limits.host_bytes == 61 * GIB
    assert limits.nvme_bytes == 95 * 10**10, "disks are not filled"
    assert (limits.ranks, limits.shared_bytes) == (2, None)


def test_keys_take_something_off_the_described_machine(hardware: Hardware) -> None:
    job = make_job(**FULL, memory_limit="10GiB", host_memory_limit="32GiB", nvme_limit="none")
    limits = machine.limits_of(job, hardware, (8, 9))
    assert (limits.device_bytes, limits.host_bytes) == (10 * GIB, 32 * GIB)
    assert limits.nvme_bytes is None
    nothing_said = machine.limits_of(make_job(gpu="4090"), hardware, (8, 9))
    assert (nothing_said.host_bytes, nothing_said.nvme_bytes) == (None, None)


@pytest.mark.parametrize(
    ("keys", "cards", "ranks"),
    [
        ({"train_batch_size": 8}, 4, 4),
        ({"train_batch_size": 8}, 1, 1),
        ({"train_batch_size": 8}, 0, 1),
        ({"train_batch_size": 8, "num_gpus": 2}, 4, 2),
        ({"train_batch_size": 8, "num_gpus": 1}, 4, 1),
        ({"train_batch_size": 8, "gpu": "rtx-4090"}, 4, 1),
    ],
)
def test_all_cards_are_used_unless_the_job_says_how_many(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, object], cards: int, ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert machine.with_all_cards(make_job(**keys)).num_gpus == ranks


def test_a_job_that_all_cards_cannot_share_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    job = make_job(train_batch_size=2, tensor_parallel_size=1, pipeline_parallel_size=1)
    with pytest.raises(ConfigError, match=r"this machine has 4 cards.*say how many with num_gpus"):
        machine.with_all_cards(job)


@pytest.mark.parametrize(
    ("gpu", "capability", "precision"),
    [
        ("v100-16g", (7, 0), "fp16"),
        ("t4", (7, 5), "fp16"),
        ("a100-40g", (8, 0), "bf16"),
        ("5090", (12, 0), "bf16"),
        ("mi300x", (8, 0), "bf16"),  # with the kernels of an Ampere
    ],
)
def test_auto_precision_is_what_the_described_card_computes_in(
    hardware: Hardware, gpu: str, capability: tuple[int, int], precision: str
) -> None:
    here = replace(hardware, accelerators=(replace(CARD, capability=(9, 0)),))
    job = make_job(gpu=gpu)
    assert machine.card_of(job, here) == machine.card_to_plan_for(job, here) == capability
    assert machine.precision_of(job, capability) == precision


def test_links_decide_what_the_runtime_holds(hardware: Hardware) -> None:
    def link(**keys: str) -> Link:
        job = make_job(**keys, train_batch_size="auto")
        return machine.link_of(job, machine.card_of(job, hardware))

    assert link(gpu="2x4090") is Link.PCIE
    assert link(gpu="8xa100-80g") is Link.NVLINK
    assert link(gpu="8xa100-80g", interconnect="pcie4") is Link.PCIE
    assert link(num_gpus="2") is Link.NVLINK, "nobody has described it"


def test_nothing_goes_to_a_disk_that_is_not_there(tmp_path: Path) -> None:
    machine.check_nvme(make_job(**FULL))
    machine.check_nvme(make_job(gpu="4090", nvme_limit="1TB"))
    none = make_job(gpu="4090")
    assert machine.why_no_nvme(none) == (
        "the machine is described without a disk; give one, like nvme: 1TB@3.5GB/s"
    )
    with pytest.raises(ConfigError, match="nothing can be on nvme: the machine is described"):
        machine.check_nvme(none)
