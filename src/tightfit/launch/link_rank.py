"""One of the ranks that `launch/link.py` starts: joins, measures, and rank 0 writes the result.

`python -m tightfit.launch.link_rank DEVICE_KIND FILE [quick]`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tightfit.launch.environment import RankPlace, place_here
from tightfit.launch.failures import Reporting
from tightfit.launch.group import meet, process_group
from tightfit.launch.lifeline import hold_lifeline
from tightfit.launch.link import ADAPTER, LIMIT_SECONDS
from tightfit.launch.processors import settle
from tightfit.planner.probe.figures import HostFigures, LinkFigures
from tightfit.planner.probe.host import best_of, host_figures
from tightfit.planner.probe.link import SIZES, fit_line, measure_collectives

_ROUNDS = 6  # of two, one rank has had 44 GFLOP/s where the same machine gave 73 before and after


def main(device_kind: str, result: Path, *, quick: bool) -> None:
    """Measure as one of the ranks that the environment describes."""
    place = place_here(os.environ)
    assert place is not None
    hold_lifeline(os.environ)
    with Reporting.of(place.rank, os.environ):
        settle(place.local_rank, place.local_world_size, os.environ)
        store = meet(place, {"torch": torch.__version__}, LIMIT_SECONDS)
        with process_group(place, store, device_kind, LIMIT_SECONDS):
            figures = _measure(place, device_kind, quick=quick)
        if place.rank == 0:
            result.write_bytes(ADAPTER.dump_json(figures))


def _measure(place: RankPlace, device_kind: str, *, quick: bool) -> LinkFigures:
    on_card = device_kind == "cuda"
    device = torch.device("cuda", place.local_rank) if on_card else torch.device("cpu")
    samples = measure_collectives(device, SIZES[:3] if quick else SIZES, 0.01 if quick else 0.15)
    return LinkFigures(
        ranks=place.world_size,
        backend="nccl" if on_card else "gloo",
        samples=tuple(samples),
        lines={
            name: fit_line(samples, name, place.world_size)
            for name in ("all_gather", "reduce_scatter", "all_reduce")
        },
        together=None if on_card else _together(0.005 if quick else 0.04),
    )


def _together(seconds: float) -> HostFigures:
    """What this rank has of the CPU while all compute; of the rounds the best."""
    found: HostFigures | None = None
    for _ in range(_ROUNDS):
        dist.barrier()
        again = host_figures(torch.get_num_threads(), seconds)
        found = again if found is None else best_of(found, again)
    assert found is not None
    dist.barrier()  # nobody leaves while another one still measures
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), quick=sys.argv[3:] == ["quick"])
