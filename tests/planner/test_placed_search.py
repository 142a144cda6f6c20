"""What leaves the device under `auto`: as little as is missing, as late and as near as can be.

With an engine that can do everything and bills from a formula, so that every fraction of every
candidate can be tried one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import make_hardware, make_job, make_rates
from transformers import PretrainedConfig

import tightfit.planner.pricing
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun, Shape
from tightfit.errors import ConfigError, DoesNotFitError
from tightfit.facts import disk
from tightfit.facts.disk import DiskRate
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner import fitting, machine, prepared
from tightfit.planner.first_fit import EQUAL_TIMES
from tightfit.planner.fractions import fraction_of, state_bytes, with_fraction
from tightfit.planner.options import Options, options_of
from tightfit.planner.placements import uses_disk
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job
from tightfit.planner.words import count_techniques
from tightfit.policies import LossKind, Policies, Tier
from tightfit.units import KIB

LAYERS = 12
SHAPE = Shape(layers=LAYERS, heads=1, hidden_size=16, vocab_size=400, tied=True, alike=True)
TRAINABLE = 400 * 16 + LAYERS * 1200
WORKLOAD = Workload(sequence_length=64, global_batch_size=2)
KEPT = 2  # layers whose activations stay
PLENTY = "1GiB"


class Formula:
    """Stands in for dry runs; counts them.

    Attributes:
        extra: bytes per layer that leaves, which no closed form knows.
        calls: depth of each dry run.
    """

    def __init__(self) -> None:
        self.extra = 0
        self.calls: list[bool] = []

    def __call__(
        self, config: object, policies: Policies, workload: Workload, **options: Any
    ) -> DryRun:
        self.calls.append(options["full_depth"])
        return DryRun(self.table(policies), TRAINABLE, 0, 0, SHAPE)

    def table(self, policies: Policies) -> MemoryTable:
        run = DryRun(MemoryTable({}), TRAINABLE, 0, 0, SHAPE)
        states = state_bytes(run, policies)
        placement, tokens = policies.placement, policies.batch.micro_batch_size * 64
        each = tokens * SHAPE.hidden_size * 4 * (1 if policies.checkpointing.enabled else 4)
        fraction = placement.optimizer_fraction
        if placement.optimizer_states is not Tier.DEVICE and fraction < 1:
            leaving = math.ceil(fraction * LAYERS)
            states[Tier.DEVICE][Kind.TRANSFER] = self.extra * leaving
        stay = LAYERS if placement.activations is Tier.DEVICE else KEPT
        backward = {tier: dict(kinds) for tier, kinds in states.items()}
        backward[Tier.DEVICE][Kind.ACTIVATIONS] = stay * each
        backward[Tier.HOST][Kind.ACTIVATIONS] = (LAYERS - stay) * each
        backward[Tier.DEVICE][Kind.LOGITS] = {
            LossKind.FULL: 3 * 4 * tokens * SHAPE.vocab_size,
            LossKind.CHUNKED: 4 * SHAPE.hidden_size * SHAPE.vocab_size + 1000,
            LossKind.SLICED: 20 * tokens,
        }[policies.loss.kind]
        if placement.parameters is not Tier.DEVICE:
            whole = placement.parameter_fraction == 1  # only then the ends leave too
            visiting = SHAPE.vocab_size * SHAPE.hidden_size if whole else 1200
            backward[Tier.DEVICE][Kind.PARAMETERS] += 4 * visiting
        if policies.batch.accumulation_steps == 1:
            backward[Tier.DEVICE].pop(Kind.GRADIENTS, None)
        return MemoryTable({Phase.BACKWARD: backward, Phase.STEP: states})


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Formula:
    bills = Formula()
    monkeypatch.setattr(tightfit.planner.pricing, "dry_run", bills)
    return bills


def lacks_nothing(policies: Policies) -> Iterator[str]:
    yield from ()


@pytest.fixture(autouse=True)
def whole_engine(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "engine_lacks", lacks_nothing)
    monkeypatch.setattr("tightfit.engine.supported.engine_lacks", lacks_nothing)


@pytest.fixture
def planned(formula: Formula, config: PretrainedConfig) -> Callable[..., Plan]:
    def run(rates: Rates | None = None, **keys: Any) -> Plan:
        job = make_job(**({"host_memory_limit": PLENTY, "nvme_limit": PLENTY} | keys))
        return plan_job(job, config, WORKLOAD, make_hardware(), rates or make_rates())

    return run


@pytest.fixture
def pricing(formula: Formula, config: PretrainedConfig) -> Pricing:
    return Pricing(options().plain(), config, WORKLOAD, make_rates())


def options(job: Job | None = None) -> Options:
    return options_of(job or make_job(), precision="fp32", chunked_loss=True)


def every_way(job: Job) -> Iterator[Policies]:
    """All candidates, and each with every fraction that is open."""
    found = options(job)
    for policies in found.candidates():
        yield policies
        name = found.open_fraction(policies)
        for leaving in range(1, LAYERS + 1 if name else 1):
            assert name is not None
            yield with_fraction(policies, name, fraction_of(leaving, LAYERS))


def device_peaks(pricing: Pricing) -> list[int]:
    return sorted({pricing.bill(p).peak_bytes(Tier.DEVICE) for p in every_way(make_job())})


def test_no_way_that_fits_is_faster_or_as_fast_with_fewer_techniques(
    planned: Callable[..., Plan], pricing: Pricing
) -> None:
    """Under every limit that tells ways apart, against all ways one by one."""
    peaks = device_peaks(pricing)
    near = [p for p in every_way(make_job()) if not uses_disk(p.placement)]
    seconds = {policies: pricing.step_time(policies).total for policies in near}
    chosen, slower = set(), 0
    for limit in peaks[:: max(1, len(peaks) // 25)]:
        plan = planned(memory_limit=str(limit))
        assert plan.fits
        fitting_ways = [p for p in near if plan.limits.missing_bytes(pricing.bill(p)) <= 0]
        best = min(seconds[policies] for policies in fitting_ways)
        # Nothing is taken for faster because it leaves, so equal ones may differ in what leaves. Of
        # parameters a few layers too many may, as the output layer, which visits the device where
        # all leave, is taken to visit it where a fraction does.
        travel = plan.policies.placement.parameters is not Tier.DEVICE
        unsure = 4e-3 if travel else 1e-6
        assert best * (1 - unsure) <= plan.step_time.total <= best * EQUAL_TIMES * (1 + unsure)
        equal = [p for p in fitting_ways if seconds[p] <= best * EQUAL_TIMES * (1 - unsure)]
        assert count_techniques(plan.policies) <= min(map(count_techniques, equal))
        slower += plan.step_time.total > best * (1 + unsure)
        chosen.add(plan.policies.placement)
    assert len(chosen) > 5
    assert slower
    assert any(0 < p.optimizer_fraction < 1 for p in chosen)
    assert any(0 < p.parameter_fraction < 1 for p in chosen)
    assert any(p.activations is Tier.HOST for p in chosen)


FIXED = {"loss": "full", "gradient_checkpointing": "false", "per_device_train_batch_size": 2,
         "offload_activations": "false"}  # fmt: skip


@pytest.mark.parametrize("extra", [0, 700, 1500])
def test_as_few_layers_leave_as_is_missing(
    planned: Callable[..., Plan], pricing: Pricing, formula: Formula, extra: int
) -> None:
    """Also where a layer that leaves takes something that only its own dry run knows."""
    formula.extra = extra
    job = make_job(**FIXED)
    resident = options(job).plain()
    peak = pricing.bill(resident).peak_bytes(Tier.DEVICE)
    for missing in (1, 10 * KIB, 30 * KIB, 60 * KIB):
        formula.calls.clear()
        plan = planned(memory_limit=str(peak - missing), **FIXED)
        leaving = math.ceil(plan.policies.placement.optimizer_fraction * LAYERS)
        assert plan.policies.placement.optimizer_states is Tier.HOST
        if leaving > 1:
            fewer = with_fraction(
                plan.policies, "optimizer_fraction", fraction_of(leaving - 1, LAYERS)
            )
            assert plan.limits.missing_bytes(pricing.bill(fewer)) > 0
        assert sum(formula.calls) <= 3, "a dry run at full depth takes seconds"
        assert len(formula.calls) <= 6


def test_nothing_leaves_that_need_not(planned: Callable[..., Plan], pricing: Pricing) -> None:
    """Not even where the host would be faster than the device."""
    peak = pricing.bill(options(make_job(**FIXED)).plain()).peak_bytes(Tier.DEVICE)
    slow = make_rates(device_optimizer_parameters_per_second=1.0)
    fits = planned(slow, memory_limit=str(peak), **FIXED)
    assert fits.policies.placement.optimizer_states is Tier.DEVICE
    short = planned(slow, memory_limit=str(peak - 1), **FIXED)
    assert math.ceil(short.policies.placement.optimizer_fraction * LAYERS) == 1


def test_the_disk_is_for_a_host_that_is_short(
    planned: Callable[..., Plan], pricing: Pricing
) -> None:
    """However fast it is."""
    fast = make_rates(disk_read_bytes_per_second=1e20, disk_write_bytes_per_second=1e20)
    tight = device_peaks(pricing)[3]
    roomy = planned(fast, memory_limit=str(tight))
    assert not uses_disk(roomy.policies.placement)
    host = roomy.bill.peak_bytes(Tier.HOST)
    short = planned(fast, memory_limit=str(tight), host_memory_limit=f"{host // 4}")
    assert uses_disk(short.policies.placement)
    assert short.policies.placement.lazy_step, "on a disk it gains"
    assert short.bill.peak_bytes(Tier.NVME) > 0
    assert any("nvme" in reason for reason in short.reasons)
    assert short.step_time.disk > 0 or short.step_time.total > 0


def test_a_disk_that_is_full_is_said(planned: Callable[..., Plan], pricing: Pricing) -> None:
    named = {"offload_optimizer": "nvme", "offload_param": "nvme"}
    with pytest.raises(DoesNotFitError, match=r"nvme: .* more than the limit") as raised:
        planned(nvme_limit="2KiB", **named)
    needed = re_bytes(str(raised.value), "nvme_limit")
    assert planned(nvme_limit=needed, **named).fits


def re_bytes(text: str, key: str) -> str:
    """The size that a message names for a key."""
    return text.split(f"{key}: ")[1].split()[0]


def test_memory_that_looks_like_a_disk_is_no_way_out(
    planned: Callable[..., Plan], pricing: Pricing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing names it, it is left out; where a key does, the key is refused."""
    tight = str(device_peaks(pricing)[3])
    host = planned(memory_limit=tight).bill.peak_bytes(Tier.HOST)
    short = {"memory_limit": tight, "host_memory_limit": f"{host // 4}"}
    assert uses_disk(planned(**short).policies.placement)
    monkeypatch.setattr(disk, "why_no_disk", lambda folder: "it is a drawing")
    monkeypatch.setattr(machine, "why_no_disk", disk.why_no_disk)
    with pytest.raises(DoesNotFitError, match=r"nvme was not tried: it is a drawing"):
        planned(**short)
    for named in ({"offload_optimizer": "nvme"}, {"offload_folder": "/somewhere"}):
        with pytest.raises(ConfigError, match=r"^offload_folder .*it is a drawing"):
            planned(**named)


def test_the_disk_is_measured_when_it_may_be_used_and_only_then(
    formula: Formula, config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []

    def measure(folder: object) -> DiskRate:
        measured.append(folder)
        return DiskRate(5e9, 1e9)

    monkeypatch.setattr(prepared, "measure_rates", lambda device, dtype: make_rates())
    monkeypatch.setattr(prepared, "measure_disk", measure)

    def run(**keys: Any) -> Plan:
        job = make_job(host_memory_limit=PLENTY, nvme_limit=PLENTY, **keys)
        return plan_job(job, config, WORKLOAD, make_hardware())

    run()
    assert measured == []
    plan = run(offload_optimizer="nvme", offload_param="none", lazy_step="false")
    assert len(measured) == 1
    states = (8 + 4) * TRAINABLE  # two moments and a master
    update = (TRAINABLE - 400 * 16) / 1e10
    assert plan.step_time.disk == pytest.approx(states * (1 / 5e9 + 1 / 1e9) - update)


def test_fractions_that_the_engine_cannot_do_are_not_planned(
    planned: Callable[..., Plan], pricing: Pricing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks_fractions(policies: Policies) -> Iterator[str]:
        if policies.placement.optimizer_fraction < 1:
            yield "offload_optimizer_fraction"

    monkeypatch.setattr(fitting, "engine_lacks", lacks_fractions)
    peak = pricing.bill(options(make_job(**FIXED)).plain()).peak_bytes(Tier.DEVICE)
    plan = planned(memory_limit=str(peak - 1), **FIXED)
    assert plan.policies.placement.optimizer_states is Tier.HOST
    assert plan.policies.placement.optimizer_fraction == 1


def test_a_fraction_that_is_given_is_taken(planned: Callable[..., Plan]) -> None:
    plan = planned(offload_optimizer="cpu", offload_param="none", offload_optimizer_fraction=0.5)
    assert plan.policies.placement.optimizer_fraction == 0.5
    assert any("50% of gradients and optimizer" in reason for reason in plan.reasons)


def test_all_leaves_where_a_place_is_named(planned: Callable[..., Plan]) -> None:
    plan = planned(offload_optimizer="cpu")
    assert plan.policies.placement == replace(
        plan.policies.placement, gradients=Tier.HOST, optimizer_states=Tier.HOST,
        optimizer_fraction=1.0, parameters=Tier.DEVICE,
    )  # fmt: skip


def test_of_what_is_missing_the_short_tier_is_named() -> None:
    table = MemoryTable({Phase.STEP: {Tier.NVME: {Kind.OPTIMIZER_STATES: 4096}}})
    use = Limits(device_bytes=10, nvme_bytes=4000).tightest(table)
    assert use is not None
    assert (use.name, use.missing_bytes, use.key) == ("nvme", 96, "nvme_limit")
