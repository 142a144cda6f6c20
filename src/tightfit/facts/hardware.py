"""The machine as it is now: cores, RAM, disk, accelerators and who else holds their memory.

Asks the operating system and NVIDIA's management library. Where that library finds no driver no
accelerators are listed; `planner/machine.py` then asks torch. Knows nothing about torch, models or
jobs, and changes nothing on the machine.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tightfit.errors import ConfigError
from tightfit.facts.cgroup import CgroupLimits, read_cgroup_limits
from tightfit.facts.disk import Disk, read_disk
from tightfit.units import format_bytes


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory of an accelerator.

    Attributes:
        used_bytes: None where the driver does not tell (some containers, Windows).
    """

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class PcieLink:
    """How a card is connected at this moment, and at most.

    A card that has nothing to do lowers its generation to save power: look while it copies.

    Attributes:
        generation, lanes: now.
        most_generation, most_lanes: that the card and the slot it is in can do together.
    """

    generation: int
    lanes: int
    most_generation: int
    most_lanes: int


@dataclass(frozen=True)
class Accelerator:
    """One card that this process may use.

    Attributes:
        index: the driver's number, in PCI order. CUDA numbers unlike cards fastest first unless
            CUDA_DEVICE_ORDER=PCI_BUS_ID is set, so with a mix name them by UUID.
        free_bytes: what no process holds at this moment.
        capability: CUDA's compute capability; None where the driver does not tell.
        uuid: of this very card; empty where nobody tells.
        pcie: None where the driver does not tell (other vendors, some virtual machines).
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[DeviceProcess, ...] = ()
    capability: tuple[int, int] | None = None
    uuid: str = ""
    pcie: PcieLink | None = None


@dataclass(frozen=True)
class Hardware:
    """The machine a job runs on.

    Attributes:
        cpu_cores: cores this process may use (affinity and container quota).
        ram_total_bytes: RAM of the machine, or of its container where that is less.
        ram_available_bytes: what can still be taken without swapping, container limit included.
        driver: version of the accelerators' driver.
    """

    cpu_name: str
    cpu_cores: int
    ram_total_bytes: int
    ram_available_bytes: int
    disk: Disk
    accelerators: tuple[Accelerator, ...] = ()
    driver: str | None = None

    @property
    def device_kind(self) -> str:
        """`cuda` when there is an accelerator, else `cpu`."""
        return "cuda" if self.accelerators else "cpu"

    @property
    def device_total_bytes(self) -> int:
        """What a job can have on the device tier: free memory of the first card and what this
        process itself already holds there, or on a CPU the RAM that is available."""
        if not self.accelerators:
            return self.ram_available_bytes
        first = self.accelerators[0]
        own = sum(p.used_bytes or 0 for p in first.processes if p.pid == os.getpid())
        return min(first.free_bytes + own, first.total_bytes)


def _ram() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _usable_cores() -> int:
    """Cores in this process's affinity mask; all cores where there are no masks (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "another user's or container's process"


def load_nvml() -> Any | None:
    """NVIDIA's management library, initialised; None without the package, driver or a card."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@dataclass(frozen=True)
class Readers:
    """Where the facts are read; a test puts fake trees and functions here.

    Attributes:
        nvml: a function that gives an object with `pynvml`'s functions, or None.
    """

    procfs: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    nvml: Callable[[], Any | None] = load_nvml
    ram: Callable[[], tuple[int, int]] = _ram
    usable_cores: Callable[[], int] = _usable_cores
    process_name: Callable[[int], str] = _process_name
    device_number: Callable[[Path], int] = lambda path: path.stat().st_dev


def detect_hardware(folder: Path, readers: Readers | None = None) -> Hardware:
    """Look at the machine; `folder` (it need not exist yet) says which disk matters.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names a card that does not exist.
    """
    readers = readers or Readers()
    limits = read_cgroup_limits(readers.procfs, readers.sysfs)
    total, available = _limited_ram(readers.ram(), limits)
    nvml = readers.nvml()
    accelerators = () if nvml is None else _read_accelerators(nvml, readers, total, available)
    return Hardware(
        cpu_name=_cpu_name(readers.procfs),
        cpu_cores=_limited_cores(readers.usable_cores(), limits),
        ram_total_bytes=total,
        ram_available_bytes=available,
        disk=read_disk(folder, readers.procfs, readers.sysfs, readers.device_number),
        accelerators=accelerators,
        driver=_text(nvml.nvmlSystemGetDriverVersion()) if nvml and accelerators else None,
    )


def describe(hardware: Hardware) -> list[str]:
    """The machine in a few lines for people."""
    lines = [
        f"CPU: {hardware.cpu_name}, {hardware.cpu_cores} cores usable",
        f"RAM: {format_bytes(hardware.ram_available_bytes)} available"
        f" of {format_bytes(hardware.ram_total_bytes)}",
        f"Disk: {format_bytes(hardware.disk.free_bytes)} free at {hardware.disk.path}"
        + ("" if hardware.disk.medium == "unknown" else f" ({hardware.disk.medium})"),
    ]
    for card in hardware.accelerators:
        lines.append(
            f"GPU {card.index}: {card.name}, {format_bytes(card.free_bytes)} free"
            f" of {format_bytes(card.total_bytes)}"
        )
        lines += [f"  held by {_describe_process(process)}" for process in card.processes]
    if hardware.driver:
        lines.append(f"Driver: {hardware.driver}")
    return lines


def _describe_process(process: DeviceProcess) -> str:
    used = "an unknown amount" if process.used_bytes is None else format_bytes(process.used_bytes)
    return f"{process.name} (pid {process.pid}): {used}"


def _limited_ram(ram: tuple[int, int], limits: CgroupLimits) -> tuple[int, int]:
    total, available = ram
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
    if limits.memory_left_bytes is not None:
        available = min(available, limits.memory_left_bytes)
    return total, min(available, total)


def _limited_cores(cores: int, limits: CgroupLimits) -> int:
    """A quota of one core and a half keeps two threads busy part of the time: round up."""
    return max(1, min(cores, cores if limits.cpus is None else math.ceil(limits.cpus)))


def _cpu_name(procfs: Path) -> str:
    try:
        lines = (procfs / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _read_accelerators(
    nvml: Any, readers: Readers, ram_total: int, ram_available: int
) -> tuple[Accelerator, ...]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    identities = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    wanted = readers.environment.get("CUDA_VISIBLE_DEVICES")
    cards = []
    for index in _visible_indices(wanted, identities):
        total, free = _device_memory(nvml, handles[index], ram_total, ram_available)
        name = _text(nvml.nvmlDeviceGetName(handles[index]))
        processes = _device_processes(nvml, handles[index], readers.process_name)
        capability, pcie = _capability(nvml, handles[index]), _pcie_link(nvml, handles[index])
        uuid = identities[index]
        cards.append(Accelerator(index, name, total, free, processes, capability, uuid, pcie))
    return tuple(cards)


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return None
    return int(major), int(minor)


def _pcie_link(nvml: Any, handle: Any) -> PcieLink | None:
    try:
        return PcieLink(
            int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )
    except nvml.NVMLError:
        return None


def _device_memory(nvml: Any, handle: Any, ram_total: int, ram_available: int) -> tuple[int, int]:
    """Total and free bytes; a card without memory of its own shares the machine's RAM."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return ram_total, ram_available
    return int(memory.total), int(memory.free)


def _device_processes(
    nvml: Any, handle: Any, process_name: Callable[[int], str]
) -> tuple[DeviceProcess, ...]:
    """Processes of both kinds, each once, the largest first; none where the driver hides them."""
    found: dict[int, int | None] = {}
    for ask in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            entries = ask(handle)
        except nvml.NVMLError:
            continue
        for entry in entries:
            found[entry.pid] = entry.usedGpuMemory
    ordered = sorted(found.items(), key=lambda item: -(item[1] or 0))
    return tuple(DeviceProcess(pid, process_name(pid), used) for pid, used in ordered)


def _visible_indices(wanted: str | None, identities: list[str]) -> list[int]:
    """The cards CUDA_VISIBLE_DEVICES leaves, in its order; all of them when it is not set.

    As in CUDA, an empty value or `NoDevFiles` (SLURM) hides all, and `-1` ends the list.
    """
    if wanted is None:
        return list(range(len(identities)))
    indices: list[int] = []
    for word in wanted.split(","):
        word = word.strip()
        if word in ("", "-1", "NoDevFiles"):
            break
        index = _card_named(word, wanted, identities)
        if index in indices:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={wanted} names card {index} twice")
        indices.append(index)
    return indices


def _card_named(word: str, wanted: str, identities: list[str]) -> int:
    if word.isdecimal() and int(word) < len(identities):
        return int(word)
    if word.startswith("GPU-"):
        matches = [i for i, uuid in enumerate(identities) if uuid.startswith(word)]
        if len(matches) == 1:
            return matches[0]
    known = ", ".join(f"{i} ({uuid})" for i, uuid in enumerate(identities)) or "none"
    advice = " Slices of a card (MIG) are not supported yet." if word.startswith("MIG-") else ""
    raise ConfigError(
        f"CUDA_VISIBLE_DEVICES={wanted}: there is no device {word!r} on this machine."
        f"{advice} Devices here: {known}. Correct or unset the variable."
    )
