"""How fast this machine is, measured in about a second: the numbers that step times come from.

Measured now, not cached: a busy machine is slower, and that is what a plan must know. Knows
nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.optim.adamw import adamw

from tightfit.planner.disk_rate import ASSUMED_DISK, DiskRate

_MATMUL_SIDE = 768  # the width of a small model's layers, where a CPU's rate is at its plateau
_BUFFER_BYTES = 32 * 2**20  # larger than a last-level cache share, so that memory is measured
_SECONDS_PER_PROBE = 0.02


@dataclass(frozen=True)
class Rates:
    """Measured rates of one device and its host.

    Attributes:
        matmul_flops_per_second: multiply-adds count as two.
        memory_bytes_per_second: read and written by element-wise operations that make a tensor.
        copy_bytes_per_second: between device and host.
        optimizer_parameters_per_second: fused AdamW in fp32, by tier of the states.
        operation_seconds: fixed cost of starting one operation.
        disk_read_bytes_per_second, disk_write_bytes_per_second: of the nvme tier's disk; assumed
            until `disk_rate.py` measures them.
    """

    matmul_flops_per_second: float
    memory_bytes_per_second: float
    copy_bytes_per_second: float
    device_optimizer_parameters_per_second: float
    host_optimizer_parameters_per_second: float
    operation_seconds: float
    disk_read_bytes_per_second: float = ASSUMED_DISK.read_bytes_per_second
    disk_write_bytes_per_second: float = ASSUMED_DISK.write_bytes_per_second

    def with_disk(self, disk: DiskRate) -> Rates:
        """The same with a disk that was measured."""
        return replace(
            self,
            disk_read_bytes_per_second=disk.read_bytes_per_second,
            disk_write_bytes_per_second=disk.write_bytes_per_second,
        )


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure `device` and the host; takes about a second."""
    host = torch.device("cpu")
    on_host = _optimizer_rate(host)
    return Rates(
        matmul_flops_per_second=_matmul_rate(device, dtype),
        memory_bytes_per_second=_memory_rate(device),
        copy_bytes_per_second=_copy_rate(device),
        device_optimizer_parameters_per_second=(
            on_host if device.type == "cpu" else _optimizer_rate(device)
        ),
        host_optimizer_parameters_per_second=on_host,
        operation_seconds=_operation_seconds(device),
    )


def _seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    """Fastest of repeated calls: the machine's rate, not its interruptions."""
    call()
    best = float("inf")
    deadline = time.perf_counter() + _SECONDS_PER_PROBE
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    rows, side = (512, _MATMUL_SIDE) if device.type == "cpu" else (4096, 4096)
    left = torch.randn(rows, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * rows * side * side / _seconds_per_call(lambda: left @ right, device)


def _memory_rate(device: torch.device) -> float:
    """Out of place, as in a model: on a CPU fresh pages cost more than the traffic itself."""
    values = torch.zeros(_BUFFER_BYTES // 4, device=device)
    return 2 * _BUFFER_BYTES / _seconds_per_call(lambda: values + 1.0, device)


def _copy_rate(device: torch.device) -> float:
    source = torch.zeros(_BUFFER_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _BUFFER_BYTES / _seconds_per_call(lambda: target.copy_(source), device)


def _optimizer_rate(device: torch.device) -> float:
    count = _BUFFER_BYTES // 4
    tensors = [torch.zeros(count, device=device) for _ in range(4)]
    steps = torch.zeros((), device=device)

    def update() -> None:
        weight, gradient, first, second = ([t] for t in tensors)
        adamw(
            weight, gradient, first, second, [], [steps], fused=True, amsgrad=False,
            maximize=False, beta1=0.9, beta2=0.999, lr=1e-3, weight_decay=0.0, eps=1e-8,
        )  # fmt: skip

    return count / _seconds_per_call(update, device)


def _operation_seconds(device: torch.device) -> float:
    small = torch.zeros(8, device=device)

    def hundred() -> None:
        for _ in range(100):
            small.add_(1.0)

    return _seconds_per_call(hundred, device) / 100
