"""Plans by a probe: its rates count, and a broken one costs a sentence and a second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.planner.conftest import make_job
from transformers import PretrainedConfig

from tightfit.facts.hardware import Hardware
from tightfit.facts.workload import Workload
from tightfit.planner import prepared
from tightfit.planner.plan import Plan
from tightfit.planner.probe.figures import Probe
from tightfit.planner.probe.kept import write_probe
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job

PlanIt = Callable[..., Plan]


@pytest.fixture
def measured() -> list[int]:
    """Threads that were measured with, one for each time."""
    return []


@pytest.fixture
def plan_it(
    monkeypatch: pytest.MonkeyPatch,
    config: PretrainedConfig,
    workload: Workload,
    hardware: Hardware,
    rates: Rates,
    measured: list[int],
) -> PlanIt:
    def measure(device: torch.device, dtype: torch.dtype) -> Rates:
        assert (device.type, dtype) == ("cpu", torch.float32)
        measured.append(torch.get_num_threads())
        return rates

    monkeypatch.setattr(prepared, "measure_rates", measure)

    def plan(threads: int | None = None, **keys: object) -> Plan:
        return plan_job(make_job(**keys), config, workload, hardware, threads=threads)

    return plan


def test_without_a_probe_a_plan_measures_and_says_so(plan_it: PlanIt, measured: list[int]) -> None:
    plan = plan_it()
    assert plan.rates.source == "quick"
    assert plan.rates.said.endswith("run `tightfit probe` for better step times")
    assert plan.to_json()["rates"] == {"source": "quick", "said": plan.rates.said}
    assert len(measured) == 1


def test_with_a_probe_nothing_is_measured(
    plan_it: PlanIt, measured: list[int], make_probe: Callable[..., Probe]
) -> None:
    before = plan_it(threads=1)
    measured.clear()
    write_probe(make_probe())
    after = plan_it(threads=1)
    assert measured == []
    assert after.rates.source == "probe"
    # Rates of 1e10 were measured before; 64 wide layers multiply at 40e9 by the probe.
    assert after.step_time.compute < before.step_time.compute
    assert plan_it(threads=2).step_time.optimizer < after.step_time.optimizer


def test_a_broken_probe_never_breaks_a_plan(
    plan_it: PlanIt, measured: list[int], make_probe: Callable[..., Probe]
) -> None:
    write_probe(make_probe()).write_text("{")
    plan = plan_it()
    assert plan.rates.source == "quick"
    assert "broken; run `tightfit probe`" in plan.rates.said
    assert len(measured) == 1


def test_what_is_measured_in_a_moment_is_measured_with_a_ranks_threads(
    plan_it: PlanIt, measured: list[int]
) -> None:
    before = torch.get_num_threads()
    plan_it(threads=before + 2)
    assert measured == [before + 2]
    assert torch.get_num_threads() == before
