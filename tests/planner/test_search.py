"""The plan is the fastest one whose bill fits, and it is the bill of the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import WORKLOAD, lacks_all_but_the_host
from transformers import PretrainedConfig

import tightfit.planner.pricing
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun, dry_run
from tightfit.errors import ConfigError, DoesNotFitError, UnsupportedError
from tightfit.facts.hardware import Accelerator, Hardware
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner.first_fit import EQUAL_TIMES
from tightfit.planner.fitting import possible
from tightfit.planner.machine import limits_of
from tightfit.planner.options import options_of, without_technique
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job
from tightfit.planner.words import count_techniques
from tightfit.policies import Policies, Tier
from tightfit.units import GIB, MIB

Planner = Callable[..., Plan]
MakeJob = Callable[..., Job]
Machine = Callable[[int], Hardware]

RANKS = [0, 5, 12, 21, 35]  # which of the thirty-six device peaks is the limit


def candidates(job: Job) -> list[Policies]:
    found = options_of(job, precision="fp32", chunked_loss=True).candidates()
    return [policies for policies in found if possible(policies)]


def peak(plan: Plan) -> int:
    return plan.bill.peak_bytes(Tier.DEVICE)


@pytest.mark.parametrize("rank", RANKS)
def test_nothing_that_fits_is_faster_or_as_fast_with_fewer_techniques(
    plan: Planner, job: MakeJob, pricing: Pricing, peaks: list[int], rank: int
) -> None:
    chosen = plan(memory_limit=peaks[rank])
    assert chosen.fits
    fitting = {
        policies: pricing.step_time(policies).total
        for policies in candidates(job())
        if all(
            chosen.limits.missing_bytes(pricing.bill(policies, full_depth=deep)) <= 0
            for deep in (False, True)
        )
    }
    latest = min(fitting.values()) * EQUAL_TIMES
    assert chosen.step_time.total <= latest
    own = count_techniques(chosen.policies), chosen.step_time.total
    for policies, seconds in fitting.items():
        assert seconds > latest or own <= (count_techniques(policies), seconds), policies


def test_tighter_limits_need_slower_plans(plan: Planner, peaks: list[int]) -> None:
    plans = [plan(memory_limit=peaks[rank]) for rank in reversed(RANKS)]
    seconds = [chosen.step_time.total for chosen in plans]
    assert seconds == sorted(seconds)
    assert len({chosen.policies for chosen in plans}) >= 4, "the limits tell no plans apart"
    assert plans[0].policies.placement.optimizer_states is Tier.DEVICE
    assert plans[-1].policies.placement.optimizer_states is Tier.HOST


def test_of_equally_fast_plans_the_one_with_fewest_techniques_wins(plan: Planner) -> None:
    """Chunked loss costs nothing in the time model; where memory is plenty it stays off."""
    chosen = plan(memory_limit="1GiB")
    assert count_techniques(chosen.policies) == 0
    assert chosen.reasons == ()
    assert chosen.alternatives == ()
    assert chosen.bill == chosen.plain


def test_the_bill_is_that_of_all_layers(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, rates: Rates, job: MakeJob
) -> None:
    deep = type(config).from_dict({**config.to_dict(), "num_hidden_layers": 6})
    fixed = job(loss="chunked", offload_optimizer="cpu", gradient_checkpointing="true")
    chosen = plan_job(fixed, deep, workload, hardware, rates)
    whole = dry_run(deep, chosen.policies, workload, full_depth=True)
    assert chosen.bill == whole.table.with_margin()
    assert chosen.bill.peak_bytes(Tier.DEVICE) > whole.table.peak_bytes(Tier.DEVICE)
    assert chosen.trainable_parameters == whole.trainable
    assert chosen.frozen_parameters == whole.frozen == 0


def test_a_plan_that_fits_on_few_layers_only_is_turned_down(
    plan: Planner, peaks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extrapolated bill may be wrong; the one of all layers decides."""
    honest = Pricing.bill
    first = plan(memory_limit=peaks[5]).policies

    def bill(self: Pricing, policies: Policies, *, full_depth: bool = False) -> MemoryTable:
        table = honest(self, policies, full_depth=full_depth)
        return table.with_margin(1.0) if full_depth and policies == first else table

    monkeypatch.setattr(Pricing, "bill", bill)
    second = plan(memory_limit=peaks[5])
    assert second.policies != first
    assert first in [candidate.policies for candidate in second.alternatives]


def test_every_alternative_says_why(plan: Planner, peaks: list[int]) -> None:
    chosen = plan(memory_limit=peaks[2])
    assert chosen.alternatives
    for candidate in chosen.alternatives:
        assert "/step)" in candidate.verdict
        if candidate.bill is None:
            assert re.search("model states alone|at least", candidate.verdict)
        else:
            assert chosen.limits.missing_bytes(candidate.bill) > 0
            assert "too much" in candidate.verdict
    seconds = [c.step_time.total for c in chosen.alternatives]
    assert seconds == sorted(seconds)


def test_plain_training_has_one_bill(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of all layers, where the one of a few is another."""
    honest = Pricing.bill

    def bill(self: Pricing, policies: Policies, *, full_depth: bool = False) -> MemoryTable:
        table = honest(self, policies, full_depth=full_depth)
        return table.with_margin(0.05) if full_depth else table

    monkeypatch.setattr(Pricing, "bill", bill)
    chosen = plan(memory_limit="1GiB")
    assert count_techniques(chosen.policies) == 0
    assert chosen.plain == chosen.bill
    leaner = plan(memory_limit="1GiB", gradient_checkpointing="true", loss="chunked")
    assert leaner.plain == leaner.bill, "what was asked for is plain"


# Limits


def test_limits_on_a_cpu(job: MakeJob, make_machine: Machine) -> None:
    machine = make_machine(3 * GIB)
    disk = {"nvme_bytes": round(0.95 * GIB)}  # a reserve stays free
    assert limits_of(job(), machine, None) == Limits(3 * GIB, 3 * GIB, 3 * GIB, **disk)
    unlimited = job(memory_limit="none")
    assert limits_of(unlimited, machine, None) == Limits(None, 3 * GIB, 3 * GIB, **disk)
    explicit = job(memory_limit="900MiB", host_memory_limit="2GiB", nvme_limit="1GiB")
    assert limits_of(explicit, machine, None) == Limits(900 * MIB, 2 * GIB, None, 1, GIB)
    none = job(memory_limit="none", host_memory_limit="none", nvme_limit="none")
    assert limits_of(none, machine, None) == Limits(None, None, None)


def test_limits_on_a_card(job: MakeJob, make_machine: Machine) -> None:
    card = Accelerator(0, "card", 10 * GIB, 8 * GIB)
    machine = replace(make_machine(3 * GIB), accelerators=(card,))
    found = limits_of(job(nvme_limit="none"), machine, (8, 0))
    assert found == Limits(8 * GIB, 3 * GIB, None)
    assert limits_of(job(memory_limit="2GiB"), machine, (8, 0)).device_bytes == 2 * GIB


def table(device: int, host: int = 0, pinned: int = 0, nvme: int = 0) -> MemoryTable:
    counts = {Tier.DEVICE: device, Tier.HOST: host, Tier.PINNED: pinned, Tier.NVME: nvme}
    return MemoryTable(
        {Phase.STEP: {tier: {Kind.PARAMETERS: count} for tier, count in counts.items()}}
    )


@pytest.mark.parametrize(
    ("limits", "bill", "missing"),
    [
        (Limits(), table(10, 10, 10), 0),
        (Limits(device_bytes=10), table(10), 0),
        (Limits(device_bytes=10), table(11, 99), 1),
        (Limits(host_bytes=10), table(99, 4, 6), 0),
        (Limits(host_bytes=10), table(99, 5, 6), 1),
        (Limits(10, 10, 15), table(9, 9), 3),
        (Limits(10, 10, 15), table(20, 9), 14),
        (Limits(nvme_bytes=10), table(99, 99, 99, 10), 0),
        (Limits(nvme_bytes=10, ranks=2), table(0, nvme=6), 2),
    ],
)
def test_missing_bytes(limits: Limits, bill: MemoryTable, missing: int) -> None:
    assert max(0, limits.missing_bytes(bill)) == missing


def test_on_a_cpu_the_host_is_no_way_out_of_the_ram(plan: Planner, peaks: list[int]) -> None:
    """Device and host are one memory: what a plan moves to the host is not saved."""
    tight = plan(memory_limit=peaks[0])
    assert tight.policies.placement.optimizer_states is Tier.HOST
    both = peak(tight) + tight.bill.peak_bytes(Tier.HOST)
    assert plan(memory_limit=peaks[0], ram_bytes=both).policies == tight.policies
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit=peaks[0], ram_bytes=both - 100)
    assert raised.value.missing_bytes == 100


def test_auto_takes_the_ram_that_is_available(plan: Planner, peaks: list[int]) -> None:
    assert count_techniques(plan().policies) == 0
    ram = peaks[-1] - 1  # of the plain plan, which takes nothing of the host
    small = plan(ram_bytes=ram)
    assert count_techniques(small.policies) > 0
    assert peak(small) + small.bill.peak_bytes(Tier.HOST) <= ram


def test_without_limits_everything_fits(plan: Planner) -> None:
    chosen = plan(memory_limit="none", host_memory_limit="none", ram_bytes=MIB)
    assert count_techniques(chosen.policies) == 0
    assert chosen.fits


# LoRA


def test_lora_is_tried_only_when_allowed_and_nothing_else_fits(
    plan: Planner, peaks: list[int]
) -> None:
    limit = peaks[0] - 1
    with pytest.raises(DoesNotFitError):
        plan(memory_limit=limit)
    lean = {"per_device_train_batch_size": 1, "loss": "chunked"}
    chosen = plan(memory_limit=limit, allow=["lora"], lora_rank=2, **lean)
    assert chosen.policies.adapter is not None
    assert chosen.policies.adapter.rank == 2
    assert chosen.frozen_parameters > chosen.trainable_parameters > 0
    assert any("LoRA" in reason for reason in chosen.reasons)
    for fitting in (peaks[0], peaks[-1]):
        allowed = plan(memory_limit=fitting, allow=["lora"], lora_rank=2)
        assert [one.kind for one in allowed.slower].count("LoRA") == 1
        assert replace(allowed, slower=()) == replace(plan(memory_limit=fitting), slower=())


# Kinds of jobs


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_checkpointing": "true"},
        {"offload_optimizer": "cpu"},
        {"loss": "chunked"},
        {"per_device_train_batch_size": 1},
    ],
)
def test_what_the_job_says_is_done_though_it_costs(plan: Planner, keys: dict[str, Any]) -> None:
    chosen = plan(**keys)
    assert count_techniques(chosen.policies) == 1
    assert len(chosen.reasons) == 1
    assert "it also fits without" in chosen.reasons[0]


def test_a_card_that_is_not_here_is_an_error_not_a_crash(
    config: PretrainedConfig, workload: Workload, make_machine: Machine, job: MakeJob
) -> None:
    machine = replace(make_machine(GIB), accelerators=(Accelerator(0, "card", GIB, GIB),))
    with pytest.raises(UnsupportedError, match="describe the machine"):
        plan_job(job(), config, workload, machine)


def test_a_default_that_is_written_changes_nothing(plan: Planner) -> None:
    assert plan(num_gpus=1).policies == plan().policies


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"optim": "adafactor", "offload_optimizer": "nvme"},
            "optim adafactor with offload_optimizer nvme .take cpu.",
        ),
        ({"finetuning_type": "lora", "quantization_bit": 8}, "quantization_bit 8"),
    ],
)
def test_what_the_engine_cannot_do_yet_is_not_planned(
    plan: Planner, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        plan(**keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"offload_param": "cpu"}, "offload_param to host"),
        ({"offload_optimizer": "nvme", "offload_activations": "true"}, "nvme, offload_activations"),
    ],
)
def test_a_placement_that_is_asked_for_and_not_in_is_refused(
    plan: Planner, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("tightfit.engine.supported.engine_lacks", lacks_all_but_the_host)
    with pytest.raises(UnsupportedError, match=said):
        plan(**keys)


def test_an_unknown_lora_target_is_named_while_planning(plan: Planner) -> None:
    with pytest.raises(ConfigError, match=r"wq.*q_proj"):
        plan(finetuning_type="lora", lora_target="wq")


# What a model does not support


@pytest.fixture
def unsupported(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the engine refuse one technique, as it does for some models."""
    honest = tightfit.planner.pricing.dry_run

    def refuse(technique: str) -> None:
        def run(
            config: PretrainedConfig, policies: Policies, workload: Workload, **options: Any
        ) -> DryRun:
            if any(name.endswith(technique) for name, _ in without_technique(policies)):
                raise UnsupportedError(f"{technique} does not work for this model")
            return honest(config, policies, workload, **options)

        monkeypatch.setattr(tightfit.planner.pricing, "dry_run", run)

    return refuse


@pytest.mark.parametrize("technique", ["sliced loss", " checkpointing"])
def test_auto_goes_around_what_the_model_does_not_support(
    plan: Planner, peaks: list[int], unsupported: Callable[[str], None], technique: str
) -> None:
    assert technique in " ".join(plan(memory_limit=peaks[0]).reasons), "it would be needed"
    unsupported(technique)
    fitting = next(limit for limit in peaks if _fits(plan, limit))
    chosen = plan(memory_limit=fitting)
    assert technique not in " ".join(chosen.reasons)
    for limit in (2000, peaks[0]):  # before and after candidates were priced
        with pytest.raises(DoesNotFitError, match="nothing fits") as raised:
            plan(memory_limit=limit)
        assert technique not in str(raised.value).splitlines()[0]


def test_what_the_model_does_not_support_is_named_among_the_alternatives(
    plan: Planner, peaks: list[int], unsupported: Callable[[str], None]
) -> None:
    needing = next(
        limit
        for limit in reversed(peaks)
        if "chunked loss" in str(plan(memory_limit=limit).reasons)
    )
    unsupported("chunked loss")
    chosen = plan(memory_limit=needing)
    refused = [c for c in chosen.alternatives if "does not work for this model" in c.verdict]
    assert refused
    assert all(candidate.bill is None for candidate in refused)


def _fits(plan: Planner, limit: int) -> bool:
    try:
        return plan(memory_limit=limit).fits
    except DoesNotFitError:
        return False


def test_what_is_asked_for_and_not_supported_is_an_error(
    plan: Planner, unsupported: Callable[[str], None]
) -> None:
    unsupported("gradient checkpointing")
    with pytest.raises(UnsupportedError, match="does not work for this model"):
        plan(gradient_checkpointing="true")


# Ranks

# Of one batch on the device alone, so that stages are all there is to choose.
STAGES_ONLY = {
    "num_gpus": 2,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "train_batch_size": 2,
    "loss": "full",
    "gradient_checkpointing": "false",
    "offload_optimizer": "none",
    "offload_param": "none",
    "offload_activations": "false",
}


def test_the_fastest_stage_that_fits_is_chosen(plan: Planner) -> None:
    given = [plan(**STAGES_ONLY, zero_stage=stage) for stage in range(4)]
    for limit in sorted({peak(chosen) for chosen in given}):
        chosen = plan(**STAGES_ONLY, memory_limit=limit)
        fitting = [one for one in given if peak(one) <= limit]
        assert chosen.step_time.total == min(one.step_time.total for one in fitting)
        assert peak(chosen) <= limit
    least = min(given, key=peak)
    assert least.policies.sharding.zero_stage > 0
    with pytest.raises(DoesNotFitError):
        plan(**STAGES_ONLY, memory_limit=peak(least) - 1)


def test_a_plan_says_what_its_stage_saves(plan: Planner) -> None:
    shared = plan(**STAGES_ONLY, zero_stage=3)
    assert any(reason.startswith("ZeRO-3: ") for reason in shared.reasons)


def test_two_ranks_compute_half_each_and_send(plan: Planner) -> None:
    keys = {key: value for key, value in STAGES_ONLY.items() if key != "num_gpus"}
    one, two = plan(**keys), plan(**STAGES_ONLY, zero_stage=0)
    # Of products; each makes all gradients.
    assert one.step_time.compute / 2 < two.step_time.compute < 0.7 * one.step_time.compute
    assert two.step_time.communication > 0 == one.step_time.communication


@pytest.mark.parametrize(("rank", "most"), [(-1, 2), (0, 11), (5, 7), (12, 7)])
def test_a_plan_takes_few_dry_runs(
    rank: int,
    most: int,
    config: PretrainedConfig,
    rates: Rates,
    hardware: Hardware,
    peaks: list[int],
) -> None:
    """So many and no more, though there are many candidates."""
    job = Job(model_name_or_path="m", train_batch_size=2, memory_limit=peaks[rank])
    priced: list[Policies] = []
    plan_job(job, config, WORKLOAD, hardware, rates, priced.append)
    assert 0 < len(priced) <= most
