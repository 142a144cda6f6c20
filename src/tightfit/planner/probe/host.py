"""Measures the CPU and the cards of this machine for a probe; seconds for each.

Where others work too, a moment's figures are low: each is taken several times, some seconds apart,
and the best one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

import torch

from tightfit.engine.precision import DTYPES
from tightfit.facts.hardware import Accelerator
from tightfit.planner import measure
from tightfit.planner.probe.figures import (
    ByWidth,
    CardFigures,
    CopyFigures,
    HostFigures,
    PcieFigures,
)

CPU = torch.device("cpu")
_HOST_WIDTHS = (64, 256, 768, 2048)
_CARD_WIDTHS = (256, 1024, 4096, 8192)
_MOST_SECONDS = 0.25  # for one product
_SECONDS = 0.04
_ROUNDS = 3
MORE_ROUNDS = 6  # where the first ones were disturbed
# fp16 is no type that jobs compute in yet, but one that people compare cards by.
_TYPES = {**DTYPES, "fp16": torch.float16}


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, and all cores."""
    counts = [1]
    while 2 * counts[-1] < cores:
        counts.append(2 * counts[-1])
    return sorted({*counts, cores})


def measure_host(counts: Sequence[int], rounds: int = _ROUNDS) -> list[HostFigures]:
    """The CPU with so many threads each; the best of some rounds over all counts, whose medians
    another process may have kept low for a while."""
    found: dict[int, HostFigures] = {}
    for _ in range(rounds):
        for count in counts:
            with measure.threads(count):
                again = host_figures(count)
            found[count] = best_of(found[count], again) if count in found else again
    return [found[count] for count in counts]


def host_figures(threads: int, seconds: float = _SECONDS) -> HostFigures:
    """The CPU now, with the threads that torch has."""
    return HostFigures(
        threads=threads,
        matmul=_products(CPU, torch.float32, _HOST_WIDTHS, seconds),
        memory=measure.memory_rate(CPU, seconds),
        copy=measure.host_copy_rate(seconds),
        optimizer=measure.optimizer_rate(CPU, seconds),
        operation_seconds=measure.operation_seconds(CPU, seconds / 2),
    )


def best_of(one: HostFigures, other: HostFigures) -> HostFigures:
    """The faster of each figure of two measurements with as many threads."""
    return replace(
        one,
        matmul={
            width: max(figures.matmul.get(width, 0.0) for figures in (one, other))
            for width in sorted({*one.matmul, *other.matmul})
        },
        memory=max(one.memory, other.memory),
        copy=max(one.copy, other.copy),
        optimizer=max(one.optimizer, other.optimizer),
        operation_seconds=min(one.operation_seconds, other.operation_seconds),
    )


def measure_types(cores: int) -> dict[str, ByWidth]:
    """Products of 16 bits on the CPU, with all cores; of those that torch can make there."""
    with measure.threads(cores):
        found = {
            name: _products(CPU, _TYPES[name], _HOST_WIDTHS, _SECONDS) for name in ("bf16", "fp16")
        }
    return {name: rates for name, rates in found.items() if rates}


def _products(
    device: torch.device, dtype: torch.dtype, widths: Sequence[int], seconds: float
) -> ByWidth:
    return measure.matmul_rates(device, dtype, widths, seconds=seconds, most_seconds=_MOST_SECONDS)


def measure_cards(
    cards: Iterable[Accelerator],
    look_again: Callable[[], Iterable[Accelerator]],
) -> list[CardFigures]:
    """Each card, one after the other.

    Args:
        look_again: for how each is connected while it is awake, right after it has copied.
    """
    return [_measure_card(card, look_again) for card in cards]


def _measure_card(
    card: Accelerator, look_again: Callable[[], Iterable[Accelerator]]
) -> CardFigures:
    device = torch.device("cuda", torch_index(card))
    with torch.cuda.device(device):
        copies = measure.copy_rates(device, _SECONDS)
        pcie = next((c.pcie for c in look_again() if c.uuid == card.uuid), None)
        figures = CardFigures(
            uuid=card.uuid,
            name=card.name,
            matmul=_card_products(device),
            memory=measure.memory_rate(device, _SECONDS),
            optimizer=measure.optimizer_rate(device, _SECONDS),
            operation_seconds=measure.operation_seconds(device, _SECONDS),
            copies=CopyFigures(**asdict(copies)),
            pcie=None if pcie is None else PcieFigures(**asdict(pcie)),
        )
        torch.cuda.empty_cache()
    return figures


def _card_products(device: torch.device) -> dict[str, ByWidth]:
    found = {
        name: _products(device, dtype, _CARD_WIDTHS, _SECONDS) for name, dtype in _TYPES.items()
    }
    with measure.tf32():
        found["tf32"] = _products(device, torch.float32, _CARD_WIDTHS, _SECONDS)
    return {name: rates for name, rates in found.items() if rates}


def torch_index(card: Accelerator) -> int:
    """torch's number of a card, which may be another one than the driver's; the driver's place
    among those that are visible where torch does not tell UUIDs."""
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None and card.uuid.removeprefix("GPU-") == str(uuid).removeprefix("GPU-"):
            return index
    return min(card.index, torch.cuda.device_count() - 1)
