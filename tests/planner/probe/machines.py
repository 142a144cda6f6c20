"""Figures of a machine that does not exist: two cores, two ranks, and cards."""

from __future__ import annotations

import dataclasses
from typing import Any

from tightfit.facts.hardware import Accelerator
from tightfit.planner.probe.figures import (
    CardFigures,
    CollectiveFigures,
    CopyFigures,
    HostFigures,
    LinkFigures,
    LinkSample,
    PcieFigures,
)
from tightfit.units import GIB


def host_figures(threads: int, speed: float) -> HostFigures:
    """Rates that are `speed` times those of one thread."""
    return HostFigures(
        threads=threads,
        matmul={64: 40e9 * speed, 1024: 80e9 * speed},
        memory=2e9 * speed,
        copy=8e9 * speed,
        optimizer=7e8 * speed,
        operation_seconds=3e-6,
    )


def card_figures(uuid: str, **given: Any) -> CardFigures:
    copies = CopyFigures(
        to_card=24e9, to_host=20e9, both=40e9, pageable_to_card=9e9, pageable_to_host=7e9
    )
    figures = CardFigures(
        uuid=uuid,
        name="A card",
        matmul={"fp32": {4096: 50e12}, "bf16": {256: 20e12, 4096: 150e12}},
        memory=900e9,
        optimizer=30e9,
        operation_seconds=4e-6,
        copies=copies,
        pcie=PcieFigures(4, 16, 4, 16),
    )
    return dataclasses.replace(figures, **given)


def link_figures(**given: Any) -> LinkFigures:
    line = CollectiveFigures(latency_seconds=4e-4, bytes_per_second=5e8)
    figures = LinkFigures(
        ranks=2,
        backend="gloo",
        samples=(LinkSample("all_gather", 4096, 5e-4), LinkSample("all_gather", 8192, 6e-4)),
        lines={"all_gather": line, "reduce_scatter": line, "all_reduce": line},
        together=host_figures(1, 0.9),
    )
    return dataclasses.replace(figures, **given)


def accelerator(uuid: str) -> Accelerator:
    return Accelerator(0, "A card", 24 * GIB, 24 * GIB, (), (8, 6), uuid)
