"""The machine as torch can use it. Knows neither models nor jobs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from tightfit.facts.hardware import Accelerator, DeviceProcess, Hardware, detect_hardware


def usable_hardware(folder: Path) -> Hardware:
    """This machine with the cards that this build of torch can use.

    A card that NVIDIA's library does not see (another vendor's, or a container without the
    library) is described by torch.

    Args:
        folder: where output goes; its disk is looked at.
    """
    hardware = detect_hardware(folder)
    if not torch.cuda.is_available():
        return replace(hardware, accelerators=())
    return hardware if hardware.accelerators else replace(hardware, accelerators=(_first_card(),))


def _first_card() -> Accelerator:
    free, total = torch.cuda.mem_get_info(0)
    own = DeviceProcess(os.getpid(), "this process", torch.cuda.memory_reserved(0))
    return Accelerator(0, torch.cuda.get_device_name(0), total, free, (own,))


def device_of(hardware: Hardware) -> torch.device:
    """The device of the first rank."""
    return torch.device("cuda", 0) if hardware.device_kind == "cuda" else torch.device("cpu")
