"""Every number in a reason is a difference of two bills; what is said to fit does fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tightfit.errors import DoesNotFitError
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner.explain import reasons_for
from tightfit.planner.fitting import possible
from tightfit.planner.options import options_of, without_technique
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.pricing import Pricing
from tightfit.policies import Tier
from tightfit.units import format_bytes, format_seconds

Planner = Callable[..., Plan]
LEANEST = {
    "per_device_train_batch_size": 1, "loss": "chunked", "gradient_checkpointing": "true",
}  # fmt: skip


def test_reasons_are_differences_of_two_bills(
    plan: Planner, peaks: list[int], pricing: Pricing
) -> None:
    chosen = plan(memory_limit=peaks[0])
    others = dict(without_technique(chosen.policies))
    assert len(chosen.reasons) == len(others) >= 3
    for reason, (name, without) in zip(chosen.reasons, others.items(), strict=True):
        bill = pricing.bill(without)
        saved = bill.peak_bytes(Tier.DEVICE) - chosen.bill.peak_bytes(Tier.DEVICE)
        seconds = chosen.step_time.total - pricing.step_time(without).total
        missing = chosen.limits.missing_bytes(bill)
        assert reason.startswith(f"{name}: {format_bytes(saved)} less on the device, ")
        assert (f"costs {format_seconds(seconds)}" in reason) is (seconds > 0)
        assert missing > 0, "in the tightest plan of all each technique is needed"
        assert reason.endswith(f"without it {format_bytes(missing)} would be missing")


def test_a_technique_that_saves_time_or_is_not_needed_says_so(pricing: Pricing) -> None:
    lean = replace(pricing.plain, placement=type(pricing.plain.placement)(Tier.HOST, Tier.HOST))
    slow = replace(pricing.rates, device_optimizer_parameters_per_second=1.0)
    reason = next(reasons_for(lean, replace(pricing, rates=slow), Limits()))
    assert "less per step; it also fits without" in reason


def advice(error: DoesNotFitError) -> dict[str, str]:
    """What the error says would fit, by kind of advice."""
    text = str(error)
    found = {
        "cutoff_len": re.search(r"would fit: cutoff_len: (\d+) instead of 128", text),
        "lora": re.search(r"would fit: LoRA \(allow: \[lora\]\): (.+) on the device", text),
        "memory_limit": re.search(r"would fit: the same plan with memory_limit: (\w+)", text),
    }
    assert text.count("would fit:") == sum(match is not None for match in found.values())
    return {name: match[1] for name, match in found.items() if match}


def test_the_message_says_how_much_is_missing(plan: Planner, peaks: list[int]) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit=peaks[0] - 5000)
    assert raised.value.missing_bytes == 5000
    assert "4.9 KiB more than the limit" in str(raised.value)
    assert format_bytes(peaks[0]) in str(raised.value)
    assert raised.value.exit_code == 3


def test_what_the_message_names_would_fit(plan: Planner, peaks: list[int]) -> None:
    """By planning again with exactly the change that is named."""
    limit = peaks[0] - 5000
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit=limit, lora_rank=2, **LEANEST)
    said = advice(raised.value)
    assert set(said) == {"cutoff_len", "lora", "memory_limit"}
    shorter = Workload(int(said["cutoff_len"]), 2)
    assert plan(workload=shorter, memory_limit=limit, **LEANEST).fits
    with_lora = plan(memory_limit=limit, lora_rank=2, allow=["lora"], **LEANEST)
    assert with_lora.fits
    assert with_lora.policies.adapter is not None
    assert plan(memory_limit=said["memory_limit"], **LEANEST).fits


def test_lora_is_not_advised_where_the_jobs_own_rank_would_not_fit(
    plan: Planner, peaks: list[int]
) -> None:
    """Rank 2 fits; what is asked about is rank 512, which is larger than the model."""
    limit = peaks[0] - 5000
    keys = {"memory_limit": limit, "lora_rank": 512, "offload_optimizer": "none"}
    with pytest.raises(DoesNotFitError) as raised:
        plan(**keys)
    assert "lora" not in advice(raised.value)
    with pytest.raises(DoesNotFitError):
        plan(**keys, allow=["lora"])


@pytest.mark.parametrize("allow", [[], ["lora"]])
def test_a_limit_below_the_model_states_names_the_smallest_plan(
    plan: Planner, peaks: list[int], allow: list[str]
) -> None:
    """No candidate is priced then; the smallest one must be found nevertheless."""
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit="1KiB", allow=allow)
    said = advice(raised.value)
    assert set(said) == {"memory_limit"}
    assert plan(memory_limit=said["memory_limit"], allow=allow).fits
    if allow:
        assert raised.value.missing_bytes < peaks[0] - 1024
        assert "LoRA" in str(raised.value)
    else:
        assert raised.value.missing_bytes == peaks[0] - 1024


def test_raising_the_device_limit_is_not_advised_where_the_ram_is_short(
    plan: Planner, peaks: list[int]
) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(ram_bytes=peaks[0] // 4)
    assert "memory_limit" not in advice(raised.value)


@pytest.mark.parametrize("ram_share", [0.9, 0.6, 0.3])
def test_what_is_missing_is_the_least_of_all_candidates(
    plan: Planner, peaks: list[int], pricing: Pricing, ram_share: float
) -> None:
    """The plan with the smallest device peak may miss the RAM by more than another."""
    ram = int(peaks[0] * ram_share)
    with pytest.raises(DoesNotFitError) as raised:
        plan(ram_bytes=ram)
    options = options_of(
        Job(model_name_or_path="m", train_batch_size=2), precision="fp32", chunked_loss=True
    )
    limits = Limits(ram, ram, ram)
    candidates = [policies for policies in options.candidates() if possible(policies)]
    least = min(limits.missing_bytes(pricing.bill(p)) for p in candidates)
    assert raised.value.missing_bytes == least
