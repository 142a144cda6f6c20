"""Which processors the thread runs on that updates what is on the host, and how many.

Beside a card, a rank's processors have little else to do, and those near the card reach its memory
and the locked pages soonest. Where the processor is itself what computes, one is enough: two that
wait for a busy third take several times as long (measured, docs/offload.md). Knows no updates.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tightfit.facts.processors import parse_cpu_list

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def update_threads(device: torch.device, processors: int, ranks_here: int) -> int:
    """Threads of the update of one rank: its share of processors, less the one that feeds the card.

    Args:
        processors: that this process may use.
        ranks_here: ranks on this machine.
    """
    if device.type == "cpu":
        return 1
    return max(1, processors // ranks_here - 1)


def prepare_update_thread(device: torch.device, ranks_here: int) -> None:
    """Say it for the calling thread, and keep it and its own threads near the card."""
    near = processors_near(device)
    if near:
        os.sched_setaffinity(0, near)  # 0 is the calling thread
    torch.set_num_threads(update_threads(device, len(os.sched_getaffinity(0)), ranks_here))


def processors_near(device: torch.device, pci_devices: Path = _PCI_DEVICES) -> set[int]:
    """Processors of the card's NUMA node that this process may use; none where nobody tells."""
    if device.type != "cuda":
        return set()
    card: Any = torch.cuda.get_device_properties(device)
    address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    try:
        told = (pci_devices / address / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    return parse_cpu_list(told) & os.sched_getaffinity(0)
