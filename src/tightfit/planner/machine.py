"""The machine as torch can use it or as the job describes it, and what a job may take of it.

Knows no models.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from tightfit.bill.runtime import Capability, Link, likely_link
from tightfit.errors import ConfigError
from tightfit.facts.disk import check_is_disk, nearest_existing, why_no_disk
from tightfit.facts.hardware import Accelerator, DeviceProcess, Hardware, detect_hardware
from tightfit.facts.job import Job
from tightfit.facts.machine import Machine, machine_of
from tightfit.facts.machine_words import parse_ram
from tightfit.facts.reached import usable_ram
from tightfit.planner.plan import Limits
from tightfit.units import parse_bytes


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
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    return Accelerator(0, name, total, free, (own,), capability)


def with_all_cards(job: Job) -> Job:
    """`job` with a rank for each card that torch sees here, if it does not say how many.

    Raises:
        ConfigError: it cannot be shared by as many, such as a batch of one.
    """
    count = torch.cuda.device_count()
    if count < 2 or "num_gpus" in job.model_fields_set or machine_of(job) is not None:
        return job
    try:
        return job.with_keys({"num_gpus": count})
    except ConfigError as error:
        raise ConfigError(
            f"this machine has {count} cards, and num_gpus is not given, so all are used: {error}; "
            "say how many with num_gpus"
        ) from None


def device_of(hardware: Hardware) -> torch.device:
    """The device of this process: torch's current card, the first one unless it is a rank."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if hardware.device_kind == "cuda"
        else torch.device("cpu")
    )


# Ampere; what a card is taken for that a job has and this machine has not.
DESCRIBED_CARD: Capability = (8, 0)
_COMPUTES_IN_BF16: Capability = (8, 0)


def card_here(hardware: Hardware) -> Capability | None:
    """The compute capability of this machine's first card; None without one."""
    if not hardware.accelerators:
        return None
    return hardware.accelerators[0].capability or DESCRIBED_CARD


def card_to_plan_for(job: Job, hardware: Hardware) -> Capability | None:
    """The described machine's card, or this machine's; None for a CPU."""
    machine = machine_of(job)
    if machine is None:
        return card_here(hardware)
    return machine.card.capability or DESCRIBED_CARD


def card_of(job: Job, hardware: Hardware) -> Capability | None:
    """The card that a job is for, or, where the job says how many cards it uses and there are none
    here, one that nobody has described."""
    described = DESCRIBED_CARD if "num_gpus" in job.model_fields_set else None
    return card_to_plan_for(job, hardware) or described


def link_of(job: Job, card: Capability | None) -> Link:
    """How the cards of a machine are connected: as it is described, or as most are."""
    machine = machine_of(job)
    if machine is None:
        return likely_link(card)
    return Link.NVLINK if machine.has_fabric else Link.PCIE


def precision_of(job: Job, card: Capability | None) -> str:
    """The job's, or what `precision: auto` means: bf16 where the card computes in it, on cards
    before fp16, on the CPU fp32."""
    if job.precision != "auto":
        return job.precision
    if card is None:
        return "fp32"
    return "bf16" if card >= _COMPUTES_IN_BF16 else "fp16"


def limits_of(job: Job, hardware: Hardware, card: Capability | None) -> Limits:
    """The limits of a job on a machine.

    Args:
        card: what the job runs on; None is the CPU.

    On a CPU device and host share the RAM, unless the job says what the host has: then it may
    describe another machine. So does a job with cards on a machine that has none, and one that
    names the cards of a machine.
    """
    machine = machine_of(job)
    if machine is not None:
        return _limits_of_described(job, machine)
    host = _limit(job.host_memory_limit, hardware.ram_available_bytes)
    on_cpu = card is None
    described = not on_cpu and not hardware.accelerators
    return Limits(
        device_bytes=_limit(job.memory_limit, None if described else hardware.device_total_bytes),
        host_bytes=None if described and job.host_memory_limit == "auto" else host,
        shared_bytes=host if on_cpu and job.host_memory_limit == "auto" else None,
        ranks=job.num_gpus,
        nvme_bytes=_limit(job.nvme_limit, None if described else _free_on_disk(job, hardware)),
    )


def _limits_of_described(job: Job, machine: Machine) -> Limits:
    disk = machine.nvme_bytes
    return Limits(
        device_bytes=_limit(job.memory_limit, machine.card.usable_bytes),
        host_bytes=_limit(job.host_memory_limit, machine.host_bytes),
        ranks=job.num_gpus,
        nvme_bytes=_limit(
            job.nvme_limit, None if disk is None else round(disk * (1 - _RESERVED_SHARE))
        ),
    )


def machine_limits(job: Job, hardware: Hardware, card: Capability | None) -> Limits:
    """What the machine has, whatever less the job says that it may take."""
    whole = dict.fromkeys(("memory_limit", "host_memory_limit", "nvme_limit"), "auto")
    return limits_of(job.model_copy(update=whole), hardware, card)


def ram_of(job: Job, hardware: Hardware) -> int | None:
    """All of the RAM of the machine that a job is for; None where nobody says."""
    if machine_of(job) is None:
        return hardware.ram_total_bytes
    return None if job.ram is None else parse_ram(job.ram).total_bytes


def with_ram(job: Job, limits: Limits, ram_bytes: int) -> Limits:
    """The limits of a job that says nothing of the host's, on a machine with so much RAM."""
    usable = usable_ram(ram_bytes)
    if limits.shared_bytes is None:
        return replace(limits, host_bytes=usable)
    device = usable if job.memory_limit == "auto" else limits.device_bytes
    return replace(limits, device_bytes=device, host_bytes=usable, shared_bytes=usable)


def why_no_nvme(job: Job) -> str | None:
    """Why nothing of a job can be on nvme; None where it can."""
    machine = machine_of(job)
    if machine is None:
        return why_no_disk(job.disk_folder)
    if machine.nvme_bytes is not None or job.nvme_limit != "auto":
        return None
    return "the machine is described without a disk; give one, like nvme: 1TB@3.5GB/s"


def check_nvme(job: Job) -> None:
    """See that the nvme tier may be where the job is for.

    Raises:
        ConfigError: what is written there is not on a disk, or there is none.
    """
    if machine_of(job) is None:
        check_is_disk(job.disk_folder)
    elif reason := why_no_nvme(job):
        raise ConfigError(f"nothing can be on nvme: {reason}")


# Left free on the disk of the nvme tier: file systems slow down when they are nearly full, and
# checkpoints may go to the same disk.
_RESERVED_SHARE = 0.05


def _free_on_disk(job: Job, hardware: Hardware) -> int:
    """What the nvme tier may take where the job does not say; `hardware` knows the disk of
    `output_dir`.

    Raises:
        ConfigError: `offload_folder` is not on a disk.
    """
    free = hardware.disk.free_bytes
    if job.offload_folder is not None:
        check_is_disk(job.disk_folder)
        free = shutil.disk_usage(nearest_existing(job.disk_folder)).free
    return round(free * (1 - _RESERVED_SHARE))


def _limit(key: str, automatic: int | None) -> int | None:
    if key == "none":
        return None
    return automatic if key == "auto" else parse_bytes(key)
