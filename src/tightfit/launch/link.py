"""Measures what ranks of this machine take to send each other tensors, with real ranks.

One rank for each card over NCCL, or some on the CPU over gloo, as `tightfit train` would start
them. Knows how ranks are started; what they measure is `planner/probe/link.py`'s business.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter
from torch._C._distributed_c10d import TCPStore

from tightfit.errors import RankError
from tightfit.launch.environment import RankPlace
from tightfit.launch.failures import first_cause
from tightfit.launch.processors import threads_variable
from tightfit.launch.workers import Workers, start_workers
from tightfit.planner.probe.figures import LinkFigures

ADAPTER = TypeAdapter(LinkFigures)
LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.05


def measure_link(
    ranks: int, device_kind: str, *, quick: bool = False, limit_seconds: float = LIMIT_SECONDS
) -> LinkFigures:
    """The link between so many ranks, at least two.

    Args:
        device_kind: `cuda`, where each rank has a card, or `cpu`.
        quick: small tensors only, to see that it works.
        limit_seconds: after which it is given up.

    Raises:
        RankError: a rank has failed, or they did not come to an end.
    """
    assert ranks > 1
    with tempfile.TemporaryDirectory(prefix="tightfit-link-") as name:
        folder = Path(name)
        result = folder / "link.json"
        command = [sys.executable, "-m", "tightfit.launch.link_rank", device_kind, str(result)]
        command += ["quick"] * quick
        with (
            _places(ranks) as places,
            start_workers(command, places, folder, _variables) as workers,
        ):
            _wait(workers, limit_seconds)
        return ADAPTER.validate_json(result.read_bytes())


@contextmanager
def _places(ranks: int) -> Iterator[list[RankPlace]]:
    """Places of ranks that meet at a store of this process, on a port that is free."""
    address = "127.0.0.1"
    store = TCPStore(
        address, 0, is_master=True, timeout=timedelta(seconds=LIMIT_SECONDS), wait_for_workers=False
    )
    yield [
        RankPlace(rank, ranks, rank, ranks, address, store.port, joins_store=True)
        for rank in range(ranks)
    ]


def _variables(place: RankPlace) -> dict[str, str]:
    return {**threads_variable(place), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _wait(workers: Workers, limit_seconds: float) -> None:
    until = time.monotonic() + limit_seconds
    while workers.running() and not workers.failures():
        if time.monotonic() > until:
            raise RankError(
                f"ranks {workers.running_ranks()} were not done after {limit_seconds:.0f} s"
            )
        time.sleep(_POLL_SECONDS)
    failures = workers.failures()
    if failures:
        raise RankError(str(first_cause(failures)))
