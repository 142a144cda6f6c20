"""Facts about machines that do not exist: fake /proc, fake /sys and a fake driver library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.errors import ConfigError
from tightfit.facts.hardware import (
    Accelerator,
    DeviceProcess,
    Hardware,
    PcieLink,
    Readers,
    describe,
    detect_hardware,
)
from tightfit.units import GIB


class FakeNVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """The functions of `pynvml` that are used, over a list of cards."""

    cards: list[dict[str, Any]] = field(default_factory=list)
    NVMLError: type[Exception] = FakeNVMLError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> str:  # noqa: N802
        return str(card["uuid"])

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> bytes:  # noqa: N802
        return b"Fake 4090"

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any]) -> Any:  # noqa: N802
        if card.get("shares_ram"):
            raise FakeNVMLError
        return SimpleNamespace(total=24 * GIB, free=card.get("free", 20 * GIB))

    def nvmlDeviceGetComputeRunningProcesses(self, card: dict[str, Any]) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in card.get("processes", ())]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: dict[str, Any]) -> list[Any]:  # noqa: N802
        raise FakeNVMLError

    def nvmlDeviceGetCudaComputeCapability(self, card: dict[str, Any]) -> list[int]:  # noqa: N802
        if "capability" not in card:
            raise FakeNVMLError
        return list(card["capability"])

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: dict[str, Any]) -> int:  # noqa: N802
        return self._pcie(card)[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: dict[str, Any]) -> int:  # noqa: N802
        return self._pcie(card)[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: dict[str, Any]) -> int:  # noqa: N802
        return self._pcie(card)[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: dict[str, Any]) -> int:  # noqa: N802
        return self._pcie(card)[3]

    def _pcie(self, card: dict[str, Any]) -> tuple[int, int, int, int]:
        if "pcie" not in card:
            raise FakeNVMLError
        return tuple(card["pcie"])  # type: ignore[return-value]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65"


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class FakeMachine:
    """A machine of 64 GiB and 16 cores; write files under `proc` and `sys` to change it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys, self.folder = root / "proc", root / "sys", root / "work"
        self.folder.mkdir()
        self.environment: dict[str, str] = {}
        self.readers = Readers(
            procfs=self.proc,
            sysfs=self.sys,
            environment=self.environment,
            nvml=lambda: None,
            ram=lambda: (64 * GIB, 60 * GIB),
            usable_cores=lambda: 16,
            process_name=lambda pid: f"process{pid}",
            device_number=lambda path: os.makedev(8, 1),
        )

    def detect(self) -> Hardware:
        return detect_hardware(self.folder, self.readers)

    def with_cards(self, *cards: dict[str, Any], visible: str | None = None) -> Hardware:
        if visible is not None:
            self.environment["CUDA_VISIBLE_DEVICES"] = visible
        named = [{"uuid": f"GPU-{letter * 4}", **card} for letter, card in zip("abcd", cards)]  # noqa: B905
        self.readers = replace(self.readers, nvml=lambda: FakeNvml(named))
        return self.detect()

    def disk(self, name: str, rotational: int, partition: str = "") -> Path:
        """A block device, with one partition if asked for, and no number yet."""
        block = self.sys / "devices" / "pci0" / name
        write(block / "queue" / "rotational", rotational)
        if partition:
            write(block / partition / "partition", 1)
        return block / partition

    def give_number(self, block: Path) -> None:
        link = self.sys / "dev" / "block" / "8:1"
        link.parent.mkdir(parents=True)
        link.symlink_to(block)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_without_limits(machine: FakeMachine) -> None:
    write(machine.proc / "cpuinfo", "processor : 0\nmodel name\t: Fake CPU 9000")
    found = machine.detect()
    assert found.cpu_name == "Fake CPU 9000"
    assert found.cpu_cores == 16
    assert (found.ram_total_bytes, found.ram_available_bytes) == (64 * GIB, 60 * GIB)
    assert (found.accelerators, found.driver, found.device_kind) == ((), None, "cpu")
    assert found.device_total_bytes == 60 * GIB


def test_this_machine() -> None:
    found = detect_hardware(Path.cwd(), Readers(environment={}))
    assert 1 <= found.cpu_cores <= (os.cpu_count() or 1)
    assert 0 < found.ram_available_bytes <= found.ram_total_bytes
    assert found.disk.free_bytes > 0
    assert describe(found)[0].startswith("CPU: ")


def test_limits_of_a_new_cgroup_and_its_parents(machine: FakeMachine) -> None:
    write(machine.proc / "self" / "cgroup", "0::/pod/box")
    pod = machine.sys / "fs" / "cgroup" / "pod"
    write(pod / "memory.max", 8 * GIB)
    write(pod / "memory.current", 7 * GIB)
    write(pod / "memory.stat", f"anon 1\ninactive_file {2 * GIB}\nsingle")
    write(pod / "box" / "memory.max", "max")
    write(pod / "box" / "cpu.max", "150000 100000")
    found = machine.detect()
    assert (found.ram_total_bytes, found.ram_available_bytes) == (8 * GIB, 3 * GIB)
    assert found.cpu_cores == 2


def test_limits_of_old_cgroups(machine: FakeMachine) -> None:
    write(machine.proc / "self" / "cgroup", "4:memory:/host/path\n1:cpu,cpuacct:/\n9:name=x:/")
    root = machine.sys / "fs" / "cgroup"
    write(root / "memory" / "memory.limit_in_bytes", 4 * GIB)
    write(root / "memory" / "memory.usage_in_bytes", 5 * GIB)
    write(root / "cpu" / "cpu.cfs_quota_us", 300000)
    write(root / "cpu" / "cpu.cfs_period_us", 100000)
    found = machine.detect()
    assert (found.ram_total_bytes, found.ram_available_bytes) == (4 * GIB, 0)
    assert found.cpu_cores == 3


def test_old_cgroups_without_limits(machine: FakeMachine) -> None:
    write(machine.proc / "self" / "cgroup", "4:memory:/\n1:cpu:/")
    root = machine.sys / "fs" / "cgroup"
    write(root / "memory" / "memory.limit_in_bytes", 2**63 - 4096)
    write(root / "cpu" / "cpu.cfs_quota_us", -1)
    write(root / "cpu" / "cpu.cfs_period_us", 100000)
    found = machine.detect()
    assert (found.ram_total_bytes, found.cpu_cores) == (64 * GIB, 16)


@pytest.mark.parametrize(
    ("name", "rotational", "partition", "medium"),
    [
        ("nvme0n1", 0, "nvme0n1p2", "nvme"),
        ("nvme0n1", 0, "", "nvme"),
        ("sda", 0, "sda1", "ssd"),
        ("sda", 1, "sda1", "hdd"),
        ("vda", 1, "", "unknown"),
    ],
)
def test_medium(
    machine: FakeMachine, name: str, rotational: int, partition: str, medium: str
) -> None:
    machine.give_number(machine.disk(name, rotational, partition))
    assert machine.detect().disk.medium == medium


def test_a_mapped_disk_is_as_slow_as_its_slowest_part(machine: FakeMachine) -> None:
    mapped = machine.disk("dm-0", 0)
    (mapped / "slaves").mkdir()
    for part in (machine.disk("nvme0n1", 0, "nvme0n1p1"), machine.disk("sdb", 1)):
        (mapped / "slaves" / part.name).symlink_to(part)
    machine.give_number(mapped)
    assert machine.detect().disk.medium == "hdd"


def test_a_file_system_with_a_number_of_its_own(machine: FakeMachine) -> None:
    block = machine.disk("nvme0n1", 0, "nvme0n1p1")
    (machine.sys / "class" / "block").mkdir(parents=True)
    (machine.sys / "class" / "block" / "nvme0n1p1").symlink_to(block)
    line = "29 1 {} / / rw shared:1 - btrfs {} rw"
    write(machine.proc / "self" / "mountinfo", line.format("0:9", "none"))
    assert machine.detect().disk.medium == "unknown"
    write(machine.proc / "self" / "mountinfo", line.format("8:1", "/dev/nvme0n1p1"))
    assert machine.detect().disk.medium == "nvme"
    write(machine.proc / "self" / "mountinfo", line.format("8:1", "/dev/elsewhere"))
    assert machine.detect().disk.medium == "unknown"


def test_disk_of_a_folder_that_does_not_exist_yet(machine: FakeMachine) -> None:
    found = detect_hardware(machine.folder / "runs" / "first", machine.readers)
    assert found.disk.path == machine.folder


def test_cards_with_their_processes(machine: FakeMachine) -> None:
    held = ((7, GIB), (8, None), (os.getpid(), 2 * GIB))
    found = machine.with_cards({"processes": held}, {"free": 23 * GIB})
    first, second = found.accelerators
    assert (first.index, first.name, first.total_bytes) == (0, "Fake 4090", 24 * GIB)
    assert [process.pid for process in first.processes] == [os.getpid(), 7, 8]
    assert first.processes[2] == DeviceProcess(8, "process8", None)
    assert (second.index, second.free_bytes, second.processes) == (1, 23 * GIB, ())
    assert (found.device_kind, found.driver) == ("cuda", "580.65")
    assert found.device_total_bytes == 22 * GIB  # what is free and what this process holds


def test_a_card_that_shares_the_ram(machine: FakeMachine) -> None:
    found = machine.with_cards({"shares_ram": True})
    assert found.accelerators[0].total_bytes == 64 * GIB
    assert found.device_total_bytes == 60 * GIB


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("1,-1,0", [1]),
        ("GPU-cccc,GPU-a", [2, 0]),
    ],
)
def test_visible_devices(machine: FakeMachine, visible: str | None, indices: list[int]) -> None:
    found = machine.with_cards({}, {}, {}, visible=visible)
    assert [card.index for card in found.accelerators] == indices
    assert found.device_kind == ("cuda" if indices else "cpu")


@pytest.mark.parametrize("visible", ["3", "0,7", "GPU-", "GPU-zzzz", "first", "MIG-aaaa", "0,0"])
def test_visible_devices_that_do_not_exist(machine: FakeMachine, visible: str) -> None:
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible}") as caught:
        machine.with_cards({}, {}, {}, visible=visible)
    assert visible == "0,0" or "2 (GPU-cccc)" in str(caught.value)


def test_compute_capability_as_far_as_the_driver_tells(machine: FakeMachine) -> None:
    found = machine.with_cards({"capability": (8, 9)}, {})
    assert [card.capability for card in found.accelerators] == [(8, 9), None]


def test_no_card_at_all(machine: FakeMachine) -> None:
    assert machine.with_cards().driver is None
    with pytest.raises(ConfigError, match="Devices here: none"):
        machine.with_cards(visible="0")


def test_describe_names_who_holds_the_memory(machine: FakeMachine) -> None:
    card = Accelerator(
        1, "Fake", 24 * GIB, 2 * GIB, (DeviceProcess(7, "game", GIB), DeviceProcess(8, "x", None))
    )
    machine.give_number(machine.disk("sda", 0))
    lines = describe(replace(machine.detect(), accelerators=(card,), driver="580"))
    assert "GPU 1: Fake, 2.00 GiB free of 24.00 GiB" in lines
    assert "  held by game (pid 7): 1.00 GiB" in lines
    assert "  held by x (pid 8): an unknown amount" in lines
    assert "Driver: 580" in lines
    assert any(line.endswith("(ssd)") for line in lines)


def test_without_the_library_or_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FakeNVMLError

    load: Callable[[], Any] = Readers().nvml
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load() is None
    broken = SimpleNamespace(nvmlInit=fail, NVMLError=FakeNVMLError)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert load() is None
    working = SimpleNamespace(nvmlInit=lambda: None, NVMLError=FakeNVMLError)
    monkeypatch.setitem(sys.modules, "pynvml", working)
    assert load() is working


def test_how_a_card_is_connected_now_and_at_most(machine: FakeMachine) -> None:
    found = machine.with_cards({"pcie": (1, 4, 4, 16)}, {})
    assert found.accelerators[0].pcie == PcieLink(1, 4, 4, 16)
    assert found.accelerators[1].pcie is None  # the driver does not tell
    assert [card.uuid for card in found.accelerators] == ["GPU-aaaa", "GPU-bbbb"]
