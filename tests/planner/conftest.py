"""A small model to plan for, fixed rates, and dry runs that are done once for all tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from tightfit.facts.disk import Disk
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner import fitting
from tightfit.planner.options import options_of
from tightfit.planner.plan import Plan
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job
from tightfit.policies import Policies, Tier
from tightfit.units import GIB

WORKLOAD = Workload(sequence_length=128, global_batch_size=2)


@pytest.fixture(scope="session")
def config() -> PretrainedConfig:
    """Two layers: cheap, and its bill is never extrapolated."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def make_rates(**given: float) -> Rates:
    """Every rate 1e10 per second, an operation a microsecond, unless given."""
    values = {
        field.name: 1e-6 if field.name.endswith("operation_seconds") else 1e10
        for field in dataclasses.fields(Rates)
        if field.type == "float"
    }
    return Rates(**(values | given))


@pytest.fixture(scope="session")
def rates() -> Rates:
    return make_rates()


def make_hardware(ram_bytes: int = 16 * GIB) -> Hardware:
    """A machine without cards."""
    return Hardware(
        cpu_name="a CPU",
        cpu_cores=2,
        ram_total_bytes=2 * ram_bytes,
        ram_available_bytes=ram_bytes,
        disk=Disk(Path("/"), GIB, "unknown"),
    )


@pytest.fixture
def hardware() -> Hardware:
    return make_hardware()


@pytest.fixture
def make_machine() -> Callable[[int], Hardware]:
    return make_hardware


def lacks_all_but_the_host(policies: Policies) -> Iterator[str]:
    """An engine that places optimizer states on the host, all of them, and nothing else."""
    placement = policies.placement
    if placement.parameters is not Tier.DEVICE:
        yield f"offload_param to {placement.parameters}"
    if placement.optimizer_states is Tier.NVME:
        yield "offload_optimizer to nvme"
    if placement.activations is not Tier.DEVICE:
        yield "offload_activations"
    if placement.optimizer_fraction < 1:
        yield "offload_optimizer_fraction"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of these tests, whatever the real one can do by now."""
    monkeypatch.setattr(fitting, "engine_lacks", lacks_all_but_the_host)


@pytest.fixture
def workload() -> Workload:
    return WORKLOAD


Planner = Callable[..., Plan]


@pytest.fixture
def plan(config: PretrainedConfig, rates: Rates) -> Planner:
    """Plans a job of these keys: `plan(memory_limit="2MiB")`."""

    def run(
        *,
        workload: Workload = WORKLOAD,
        ram_bytes: int = 16 * GIB,
        rates: Rates = rates,
        **keys: Any,
    ) -> Plan:
        return plan_job(make_job(**keys), config, workload, make_hardware(ram_bytes), rates)

    return run


def make_job(**keys: Any) -> Job:
    return Job(**{"model_name_or_path": "m", "train_batch_size": 2, **keys})


@pytest.fixture
def job() -> Callable[..., Job]:
    return make_job


@pytest.fixture(scope="session")
def pricing(config: PretrainedConfig, rates: Rates) -> Pricing:
    options = options_of(make_job(), precision="fp32", chunked_loss=True)
    return Pricing(options.plain(), config, WORKLOAD, rates)


@pytest.fixture(scope="session")
def peaks(pricing: Pricing) -> list[int]:
    """Device peaks of all ways to train all parameters, from the least: limits to plan for."""
    options = options_of(make_job(), precision="fp32", chunked_loss=True)
    possible = [p for p in options.candidates() if not any(lacks_all_but_the_host(p))]
    bills = [pricing.bill(policies, full_depth=True) for policies in possible]
    return sorted(bill.peak_bytes(Tier.DEVICE) for bill in bills)
