"""The machine as torch can use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tightfit.facts.hardware import Hardware, detect_hardware


def usable_hardware(folder: Path) -> Hardware:
    """This machine, without cards that this build of torch cannot use.

    Args:
        folder: where output goes; its disk is looked at.
    """
    hardware = detect_hardware(folder)
    if hardware.accelerators and not torch.cuda.is_available():
        return replace(hardware, accelerators=())
    return hardware


def device_of(hardware: Hardware) -> torch.device:
    """The device of the first rank."""
    return torch.device("cuda", 0) if hardware.device_kind == "cuda" else torch.device("cpu")
