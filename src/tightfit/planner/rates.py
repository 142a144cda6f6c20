"""How fast a machine is, as step times need it: what was probed, or measured in about a second.

What is measured in a second is what the machine gives at that moment: other work takes its part,
and the figures of two moments have been 7 times apart. `tightfit probe` (`planner/probe/`) takes
longer and keeps what it finds. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tightfit.facts.disk import ASSUMED_DISK, DiskRate
from tightfit.planner import measure

# What two ranks of a CPU that is not idle send each other over gloo; measuring it takes ranks,
# whose start takes longer than a plan. Too slow is the safe side: copies in memory are ten times as
# fast, and what is reckoned with those shares out layers for a gain that is not there.
ASSUMED_GLOO = (3e-4, 1e9)
_MATMUL_WIDTHS = {"cpu": 768, "cuda": 4096}  # where a device's rate is at its plateau


@dataclass(frozen=True)
class Collective:
    """What one kind of collective takes: `latency_seconds + sent bytes / bytes_per_second`.

    Sent bytes are those that each rank sends in a ring (`planner/collectives.py`), so that the rate
    is the link's, whatever the number of ranks; nccl-tests calls it the bus bandwidth.
    """

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, sent_bytes: float) -> float:
        """Of one call in which each rank sends so much."""
        return self.latency_seconds + sent_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Link:
    """What ranks of one machine take to send each other tensors, all of them at once."""

    all_gather: Collective
    reduce_scatter: Collective
    all_reduce: Collective

    @classmethod
    def of(cls, latency_seconds: float, bytes_per_second: float) -> Link:
        """One that all collectives pass alike."""
        alike = Collective(latency_seconds, bytes_per_second)
        return cls(alike, alike, alike)


@dataclass(frozen=True)
class Rates:
    """Rates of one rank: its device, its part of the host, and what is between.

    Attributes:
        matmul_flops_per_second: multiply-adds count as two.
        memory_bytes_per_second: read and written by element-wise operations that make a tensor.
        copy_bytes_per_second: between device and host, in the slower direction.
        host_memory_bytes_per_second: read and written in place, of the host's memory.
        optimizer_parameters_per_second: fused AdamW in fp32, by tier of the states.
        operation_seconds: fixed cost of starting one operation.
        disk_read_bytes_per_second, disk_write_bytes_per_second: of the nvme tier's disk; assumed
            until `disk_rate.py` measures them.
        matmul_by_width: width of a layer and the rate of its products, widths rising; empty where
            nobody has looked, and `matmul_flops_per_second` counts for all.
        link: between the ranks of this machine; None where nobody has measured or assumed it.
        network: between machines, of all ranks of one together; None where nobody has.
    """

    matmul_flops_per_second: float
    memory_bytes_per_second: float
    copy_bytes_per_second: float
    host_memory_bytes_per_second: float
    device_optimizer_parameters_per_second: float
    host_optimizer_parameters_per_second: float
    operation_seconds: float
    disk_read_bytes_per_second: float = ASSUMED_DISK.read_bytes_per_second
    disk_write_bytes_per_second: float = ASSUMED_DISK.write_bytes_per_second
    matmul_by_width: tuple[tuple[int, float], ...] = ()
    link: Link | None = None
    network: Link | None = None

    def with_disk(self, disk: DiskRate) -> Rates:
        """The same with a disk that was measured."""
        return replace(
            self,
            disk_read_bytes_per_second=disk.read_bytes_per_second,
            disk_write_bytes_per_second=disk.write_bytes_per_second,
        )

    def in_place_bytes_per_second(self, *, on_card: bool) -> float:
        """Read and written on the device without making a tensor."""
        return self.memory_bytes_per_second if on_card else self.host_memory_bytes_per_second

    def new_bytes_per_second(self, *, on_card: bool) -> float:
        """Written into a large new tensor. What costs time on a CPU is not the writing but the new
        pages, so that it takes what reading and writing takes together where those are measured."""
        return self.memory_bytes_per_second / (1 if on_card else 2)

    def at_width(self, width: int) -> Rates:
        """The same for a model whose layers are so wide."""
        if not self.matmul_by_width:
            return self
        rate = interpolate(dict(self.matmul_by_width), width)
        return replace(self, matmul_flops_per_second=rate)


def interpolate(
    known: dict[int, float], at: int, scale: Callable[[float], float] = math.log
) -> float:
    """What is known at some sizes, at another one: on the straight line between its neighbours,
    and beyond the ends what is known there.

    Args:
        known: not empty; sizes above 0.
        scale: of sizes, along which the line is straight.
    """
    below = [size for size in known if size <= at]
    above = [size for size in known if size >= at]
    if not below or not above:
        return known[max(below) if below else min(above)]
    low, high = max(below), min(above)
    if low == high:
        return known[low]
    share = (scale(at) - scale(low)) / (scale(high) - scale(low))
    return known[low] + share * (known[high] - known[low])


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure `device` and the host now, with the threads that torch has; takes about a second."""
    on_host = measure.optimizer_rate(torch.device("cpu"))
    return Rates(
        matmul_flops_per_second=measure.matmul_rate(device, dtype, _MATMUL_WIDTHS[device.type]),
        memory_bytes_per_second=measure.memory_rate(device),
        copy_bytes_per_second=measure.copy_rate(device),
        host_memory_bytes_per_second=2 * measure.host_copy_rate(),
        device_optimizer_parameters_per_second=(
            on_host if device.type == "cpu" else measure.optimizer_rate(device)
        ),
        host_optimizer_parameters_per_second=on_host,
        operation_seconds=measure.operation_seconds(device),
        link=Link.of(*ASSUMED_GLOO) if device.type == "cpu" else None,
    )
