"""What is measured between ranks is what the engine sends by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tightfit.engine import rings
from tightfit.planner.probe.link import measure_collectives


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one real rank on gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("on_gloo", [True, False])
def test_cpus_send_round_the_engines_ring(monkeypatch: pytest.MonkeyPatch, on_gloo: bool) -> None:
    called: list[str] = []
    monkeypatch.setattr(rings, "goes_round", lambda tensor, group: on_gloo)
    for name in ("gather", "scatter_sum"):
        monkeypatch.setattr(rings, name, lambda *inputs, name=name: called.append(name))
    samples = measure_collectives(torch.device("cpu"), [64], 0.001)
    assert {sample.collective for sample in samples} == {
        "all_gather", "reduce_scatter", "all_reduce",
    }  # fmt: skip
    assert set(called) == ({"gather", "scatter_sum"} if on_gloo else set())
