"""Bills from a few layers against bills of all layers, for every architecture of the catalogue.

Prints, and writes to benchmarks/results/extrapolation.md, the largest difference in any phase and
tier. Plain training is tried with each, LoRA and ZeRO-3 with every fourth by turns. Takes half an
hour.

    python benchmarks/extrapolation.py
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tightfit.bill.table import MemoryTable
from tightfit.dry_run import dry_run
from tightfit.errors import UnsupportedError
from tightfit.facts.attention import default_attention
from tightfit.facts.catalogue import catalogue_names
from tightfit.facts.model_spec import load_model_spec
from tightfit.facts.workload import Workload
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    Policies,
    PrecisionPolicy,
    ShardingPolicy,
    Tier,
)

RESULT = Path(__file__).parent / "results" / "extrapolation.md"
BF16 = PrecisionPolicy("bf16")
WORKLOAD = Workload(256, 8, evaluation_sequence_length=256)
POLICIES = [
    ("full", Policies(precision=BF16, batch=BatchPolicy(1, 8))),
    (
        "LoRA, checkpointing",
        Policies(
            precision=BF16,
            batch=BatchPolicy(2, 4),
            adapter=AdapterPolicy(),
            checkpointing=CheckpointingPolicy(True),
        ),
    ),
    (
        "ZeRO-3 on 8",
        Policies(precision=BF16, batch=BatchPolicy(1, 1), sharding=ShardingPolicy(8, 3)),
    ),
]
EVERY = 4
# What a config says that no allocation depends on.
_NAMES_ONLY = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    "architectures",
    "initializer_range",
    "layer_norm_epsilon",
)


def architectures() -> Iterator[tuple[str, dict[str, Any]]]:
    """One name for each distinct architecture, smallest depth first."""
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in catalogue_names():
        config = load_model_spec(name).config
        shape = {key: value for key, value in config.items() if key not in _NAMES_ONLY}
        seen.setdefault(json.dumps(shape, sort_keys=True), (name, config))
    yield from seen.values()


def worst(few: MemoryTable, whole: MemoryTable) -> tuple[float, str]:
    """The largest relative difference of a phase and tier, and where it is."""
    found = [(0.0, "none")]
    for phase in whole.peaks:
        for tier in Tier:
            expected = whole.phase_peak_bytes(phase, tier)
            if expected:
                error = few.phase_peak_bytes(phase, tier) / expected - 1
                found.append((error, f"{phase}, {tier}"))
    return max(found, key=lambda entry: abs(entry[0]))


def compare(index: int, name: str, config: dict[str, Any]) -> list[tuple[str, float]]:
    """A row of the page for each of the policies, and its difference."""
    kernel = AttentionPolicy(AttentionKernel(default_attention(config)))
    more = [POLICIES[1 + index // EVERY % 2]] if index % EVERY == 0 else []
    rows = []
    for label, policies in (POLICIES[0], *more):
        own = replace(policies, attention=kernel)
        try:
            begin = time.perf_counter()
            few = dry_run(config, own, WORKLOAD)
            middle = time.perf_counter()
            whole = dry_run(config, own, WORKLOAD, full_depth=True)
            end = time.perf_counter()
        except UnsupportedError as error:
            rows.append((f"| {name} | {label} | refused: {error} | | |", 0.0))
            continue
        error, where = worst(few.table, whole.table)
        peak = whole.table.peak_bytes(Tier.DEVICE) / 2**30
        times = (end - middle) / (middle - begin)
        text = f"| {name} | {label} | {peak:.2f} | {error:+.4%} ({where}) | {times:.1f} |"
        rows.append((text, abs(error)))
    return rows


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--processes", type=int, default=1, help="architectures at a time")
    given = parser.parse_args()
    jobs = [
        (index, name, config)
        for index, (name, config) in enumerate(architectures())
        if given.only in name
    ]
    rows: list[tuple[str, float]] = []
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        for found in pool.map(compare, *zip(*jobs, strict=True)):
            rows += found
            print(*(text for text, _ in found), sep="\n", flush=True)
    if not given.only:
        RESULT.write_text(_page([text for text, _ in rows], max(error for _, error in rows)))


def _page(rows: list[str], largest: float) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    head = [
        "# A few layers stand for all",
        "",
        f"Made by `benchmarks/extrapolation.py` on {date.today()}, Python "
        f"{platform.python_version()}, {versions}.",
        "",
        f"Every distinct architecture of the catalogue; largest difference: {largest:.4%}.",
        "",
        "| model | policies | device peak at full depth, GiB | largest difference "
        "| times as fast |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    main()
