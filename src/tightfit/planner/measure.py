"""Measurements of one device, a fraction of a second each: what step times are made of.

Each is the median of repeated calls: a step is interrupted as often as they are, so the fastest
call would promise too much (a fifth on a shared machine). Knows nothing of models, and keeps
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch.optim.adamw import adamw

from tightfit.units import MIB

_SECONDS = 0.02
_LEAST_CARD_SECONDS = 1e-3  # between two events, whose clock is coarse
_MOST_CALLS = 100
_LEAST_TIMES = 3  # a thread that others delay is late for more than one call
_HOST_BUFFER_BYTES = 32 * MIB  # more than a rank's share of a last-level cache
_CARD_BUFFER_BYTES = 512 * MIB  # more than the level 2 cache of any card
_CARD_SHARE = 1 / 16  # of the memory that is free, for one buffer
_OPERATIONS = 100


def seconds_per_call(
    call: Callable[[], object], device: torch.device, seconds: float = _SECONDS
) -> float:
    """Median seconds of the calls after the first that fit into `seconds`, but of at least four:
    two threads on a busy machine may be 500 times as late as one.

    On a card between two events of the current stream, so that what the host takes to start a
    kernel does not count.
    """
    call()
    once = _card_seconds if device.type == "cuda" else _host_seconds
    taken = [once(call, 1)]
    calls = 1
    if device.type == "cuda":
        calls = max(1, min(_MOST_CALLS, round(_LEAST_CARD_SECONDS / max(taken[0], 1e-9))))
    deadline = time.perf_counter() + seconds
    while len(taken) <= _LEAST_TIMES or time.perf_counter() < deadline:
        taken.append(once(call, calls))
    return median(taken)


def _host_seconds(call: Callable[[], object], calls: int) -> float:
    assert calls == 1
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _card_seconds(call: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


def matmul_rate(
    device: torch.device, dtype: torch.dtype, width: int, *, seconds: float = _SECONDS
) -> float:
    """Operations per second, a multiply-add being two, of a small batch of tokens through a linear
    layer of that width: its output and both gradients, `[rows, width] @ [width, width]` twice and
    `[width, rows] @ [rows, width]`."""
    rows = matmul_rows(device)
    values, gradients = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(width, width, device=device).to(dtype)

    def forward_and_backward() -> None:
        _ = values @ weight.T
        _ = gradients @ weight
        _ = gradients.T @ values

    return matmul_operations(device, width) / seconds_per_call(
        forward_and_backward, device, seconds
    )


def matmul_rows(device: torch.device) -> int:
    """Tokens that are multiplied at once."""
    return 512 if device.type == "cpu" else 4096


def matmul_operations(device: torch.device, width: int) -> int:
    """Of the three products of `matmul_rate`."""
    return 3 * 2 * matmul_rows(device) * width * width


def matmul_rates(
    device: torch.device,
    dtype: torch.dtype,
    widths: Sequence[int],
    *,
    seconds: float = _SECONDS,
    most_seconds: float,
) -> dict[int, float]:
    """The rate at each width, from the smallest up; those whose product would take longer than
    `most_seconds` by the rate of the last one are left out, as is what torch cannot multiply.

    A CPU that has no instructions for a type may take 600 times as long with it.
    """
    rates: dict[int, float] = {}
    for width in sorted(widths):
        last = next(reversed(rates.values()), None)
        if last is not None and matmul_operations(device, width) / last > most_seconds:
            break
        try:
            rates[width] = matmul_rate(device, dtype, width, seconds=seconds)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                break
            if "not implemented" not in str(error) and "not support" not in str(error):
                raise
            break
    return rates


@contextmanager
def tf32() -> Iterator[None]:
    """Inside, fp32 products on cards are rounded to TF32, as jobs may ask torch to do."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def buffer_bytes(device: torch.device) -> int:
    """Of one buffer: larger than caches, and a small part of what is free."""
    if device.type == "cpu":
        return _HOST_BUFFER_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(_CARD_BUFFER_BYTES, max(MIB, int(free * _CARD_SHARE) // MIB * MIB))


def memory_rate(device: torch.device, seconds: float = _SECONDS) -> float:
    """Bytes per second that an element-wise operation reads and writes.

    Out of place, as in a model: on a CPU fresh pages cost more than the traffic itself.
    """
    size = buffer_bytes(device)
    values = torch.zeros(size // 4, device=device)
    return 2 * size / seconds_per_call(lambda: values + 1.0, device, seconds)


def host_copy_rate(seconds: float = _SECONDS) -> float:
    """Bytes per second copied from one place of the host's memory to another, that both are there
    already; as many are read and as many written."""
    source, target = (torch.zeros(_HOST_BUFFER_BYTES, dtype=torch.uint8) for _ in range(2))
    return _HOST_BUFFER_BYTES / seconds_per_call(
        lambda: target.copy_(source), torch.device("cpu"), seconds
    )


@dataclass(frozen=True)
class CopyRates:
    """Bytes per second between a card and its host.

    Attributes:
        to_card, to_host: from and to page-locked memory, one direction alone.
        both: of both directions together when both go at once, page-locked.
        pageable_to_card, pageable_to_host: the same with ordinary memory of the host, through
            the driver's own buffers.
    """

    to_card: float
    to_host: float
    both: float
    pageable_to_card: float
    pageable_to_host: float


def copy_rates(device: torch.device, seconds: float = _SECONDS) -> CopyRates:
    """How fast a card and its host copy."""
    size = buffer_bytes(device)
    on_card, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    locked, other_locked = (torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2))
    pageable = torch.zeros(size, dtype=torch.uint8)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return size / seconds_per_call(copy, device, seconds)

    both = _both_at_once((on_card, locked), (other_locked, other))
    return CopyRates(
        to_card=rate(on_card, locked),
        to_host=rate(locked, on_card),
        both=2 * size / seconds_per_call(both, device, seconds),
        pageable_to_card=rate(on_card, pageable),
        pageable_to_host=rate(pageable, on_card),
    )


def _both_at_once(*copies: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """A call that copies each source to its target on a stream of its own; the current stream
    begins before them and ends after them."""
    streams = [torch.cuda.Stream() for _ in copies]

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream, (target, source) in zip(streams, copies, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    return both


def copy_rate(device: torch.device, seconds: float = _SECONDS) -> float:
    """Bytes per second that leave a device for the host, page-locked where there is a card."""
    if device.type == "cpu":
        return host_copy_rate(seconds)
    size = buffer_bytes(device)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8).pin_memory()
    return size / seconds_per_call(lambda: target.copy_(source, non_blocking=True), device, seconds)


def optimizer_rate(device: torch.device, seconds: float = _SECONDS) -> float:
    """Parameters per second that fused AdamW updates in fp32."""
    count = buffer_bytes(device) // 4
    tensors = [torch.zeros(count, device=device) for _ in range(4)]
    steps = torch.zeros((), device=device)

    def update() -> None:
        weight, gradient, first, second = ([t] for t in tensors)
        adamw(
            weight, gradient, first, second, [], [steps], fused=True, amsgrad=False,
            maximize=False, beta1=0.9, beta2=0.999, lr=1e-3, weight_decay=0.0, eps=1e-8,
        )  # fmt: skip

    return count / seconds_per_call(update, device, seconds)


def operation_seconds(device: torch.device, seconds: float = _SECONDS) -> float:
    """What starting an operation costs the host, however little it has to do."""
    small = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(_OPERATIONS):
            small.add_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return seconds_per_call(many, torch.device("cpu"), seconds) / _OPERATIONS


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
