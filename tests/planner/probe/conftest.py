"""A machine that was probed: two cores and two ranks, and what else a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.planner.probe.machines import host_figures, link_figures

from tightfit.facts.hardware import Hardware
from tightfit.planner.probe.figures import Probe
from tightfit.planner.probe.kept import identity_of

MakeProbe = Callable[..., Probe]


@pytest.fixture
def make_probe(hardware: Hardware) -> MakeProbe:
    def make(**given: Any) -> Probe:
        values: dict[str, Any] = {
            "schema": 1,
            "identity": identity_of(hardware),
            "made": "2026-12-01T10:00:00+00:00",
            "busy_cores": 0.0,
            "nodes": ((0, 1),),
            "cores": 2,
            "host": (host_figures(1, 1.0), host_figures(2, 1.5)),
            "matmul": {"bf16": {64: 1e9}},
            "cards": (),
            "disk": None,
            "link": link_figures(),
            "notes": (),
        }
        return Probe(**(values | given))

    return make


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
