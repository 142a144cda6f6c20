"""How fast ranks send each other tensors: the engine's collectives, of the sizes that layers have,
and the line through them.

Runs inside a process group that somebody else has made (`launch/link.py`); every rank calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch
import torch.distributed as dist

from tightfit.engine import rings
from tightfit.planner.probe.figures import CollectiveFigures, CollectiveName, LinkSample
from tightfit.units import KIB, MIB

SIZES = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB)
_SECONDS = 0.15  # for one collective of one size
_LEAST_CALLS, _MOST_CALLS = 3, 30


def sent_share(collective: CollectiveName, ranks: int) -> float:
    """The bytes that each rank sends in a ring, as a part of the whole tensor's."""
    once = (ranks - 1) / ranks
    return 2 * once if collective == "all_reduce" else once


def measure_collectives(
    device: torch.device, sizes: Iterable[int] = SIZES, seconds: float = _SECONDS
) -> list[LinkSample]:
    """The median seconds of each collective for whole tensors of these sizes, of rank 0."""
    samples: list[LinkSample] = []
    for size in sizes:
        for name, call in _calls(device, size).items():
            taken = _median_seconds(call, device, seconds)
            samples.append(LinkSample(collective=name, whole_bytes=size, seconds=taken))
    return samples


def _calls(device: torch.device, size: int) -> dict[CollectiveName, Callable[[], object]]:
    """Of fp32 tensors; what is whole is a multiple of the ranks, and the sizes are large enough."""
    ranks = dist.get_world_size()
    part = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(ranks * part.numel(), device=device)
    group = dist.group.WORLD
    assert group is not None
    if rings.goes_round(whole, group):  # as the engine sends between ranks on CPUs
        return {
            "all_gather": lambda: rings.gather(whole, group),
            "reduce_scatter": lambda: rings.scatter_sum(part, whole, group),
            "all_reduce": lambda: dist.all_reduce(whole),
        }
    gather = _newest("all_gather_single", "all_gather_into_tensor")
    scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    return {
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
    }


def _newest(*names: str) -> Callable[..., object]:
    """The first of these that torch has; it has given collectives new names."""
    found: Callable[..., object] = next(
        getattr(dist, name) for name in names if hasattr(dist, name)
    )
    return found


def _median_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    call()
    first = _seconds(call, device)
    # All ranks make as many calls: as many as fit by the slowest one.
    slowest = torch.tensor([first], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    count = max(_LEAST_CALLS, min(_MOST_CALLS, int(seconds / max(slowest.item(), 1e-9))))
    return median(_seconds(call, device) for _ in range(count))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def fit_line(
    samples: Iterable[LinkSample], collective: CollectiveName, ranks: int
) -> CollectiveFigures:
    """Latency and rate of one collective: least squares of the errors relative to what was
    measured, so that small tensors count as much as large ones.

    Neither is below zero: where the line says so, latency is none.

    Args:
        samples: at least two sizes of this collective, others do not matter.
    """
    points = [
        (sample.whole_bytes * sent_share(collective, ranks), sample.seconds)
        for sample in samples
        if sample.collective == collective
    ]
    assert len({sent for sent, _ in points}) > 1, "a line needs two sizes"
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    at = sum(w * sent for w, (sent, _) in zip(weights, points, strict=True)) / total
    mean = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (sent - at) ** 2 for w, (sent, _) in zip(weights, points, strict=True))
    together = sum(
        w * (sent - at) * (seconds - mean)
        for w, (sent, seconds) in zip(weights, points, strict=True)
    )
    slope = together / spread
    largest, longest = max(points)
    if slope <= 0:  # larger tensors were no slower: latency is all that was seen
        return CollectiveFigures(
            latency_seconds=min(seconds for _, seconds in points),
            bytes_per_second=largest / longest,
        )
    return CollectiveFigures(
        latency_seconds=max(0.0, mean - slope * at), bytes_per_second=1 / slope
    )
