"""Says in plain words why a plan has its techniques, and what would help when nothing fits.

Every number is that of a dry run with one thing changed. Knows nothing of how plans are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tightfit.bill.table import MemoryTable
from tightfit.errors import DoesNotFitError
from tightfit.planner.options import without_technique
from tightfit.planner.plan import Limits, count_techniques, describe_policies
from tightfit.planner.pricing import Pricing
from tightfit.policies import AdapterPolicy, Policies, PrecisionPolicy, Tier
from tightfit.units import MIB, format_bytes, format_seconds

_SHORTEST_SEQUENCE = 64


def reasons_for(policies: Policies, pricing: Pricing, limits: Limits) -> Iterator[str]:
    """One sentence for each technique: what it saves here and what it costs."""
    bill, seconds = pricing.bill(policies), pricing.step_time(policies).total
    peak = bill.peak_bytes(Tier.DEVICE)
    for name, without in without_technique(policies):
        other = pricing.bill(without)
        saved = other.peak_bytes(Tier.DEVICE) - peak
        cost = seconds - pricing.step_time(without).total
        over = limits.missing_bytes(other)
        needed = (
            f"without it {format_bytes(over)} would be missing"
            if over > 0
            else "it also fits without"
        )
        price = (
            f"costs {format_seconds(cost)} per step"
            if cost > 0
            else f"takes {format_seconds(-cost)} less per step"
            if cost < 0
            else "costs no time"
        )
        yield f"{name}: {format_bytes(saved)} less on the device, {price}; {needed}"


def nothing_fits(
    candidates: Sequence[Policies], lora: AdapterPolicy, pricing: Pricing, limits: Limits
) -> DoesNotFitError:
    """The error that says how much is missing and names the nearest plan that would fit.

    Args:
        candidates: what was turned down.
        lora: what could be tried as well if the job allowed it.
    """
    policies, bill = _nearest_miss(candidates, pricing, limits)
    missing = limits.missing_bytes(bill)
    lines = [
        f"nothing fits: the smallest plan ({describe_policies(policies)}) needs "
        f"{format_bytes(bill.peak_bytes(Tier.DEVICE))} on the device and "
        f"{format_bytes(bill.peak_bytes(Tier.HOST))} on the host, {format_bytes(missing)} more "
        f"than the limit ({limits.tightest(bill)}).",
        *(f"  would fit: {line}" for line in _would_fit(policies, lora, pricing, limits)),
    ]
    return DoesNotFitError("\n".join(lines), missing)


def _nearest_miss(
    candidates: Sequence[Policies], pricing: Pricing, limits: Limits
) -> tuple[Policies, MemoryTable]:
    """The candidate that misses the limits by least, of equal ones that with fewest techniques."""

    def miss(policies: Policies) -> tuple[int, int]:
        return limits.missing_bytes(pricing.bill(policies)), count_techniques(policies)

    nearest = min(candidates, key=miss)
    return nearest, pricing.bill(nearest, full_depth=True)


def _fits(policies: Policies, pricing: Pricing, limits: Limits) -> bool:
    return all(
        limits.missing_bytes(pricing.bill(policies, full_depth=full_depth)) <= 0
        for full_depth in (False, True)
    )


def _would_fit(
    policies: Policies, lora: AdapterPolicy, pricing: Pricing, limits: Limits
) -> Iterator[str]:
    """What would fit, from what changes least."""
    shorter = _longest_sequence_that_fits(policies, pricing, limits)
    if shorter is not None:
        yield f"cutoff_len: {shorter} instead of {pricing.workload.sequence_length}"
    if policies.precision.parameters == "fp32":
        half = replace(policies, precision=PrecisionPolicy("bf16"))
        if _fits(half, pricing, limits):
            peak = pricing.bill(half, full_depth=True).peak_bytes(Tier.DEVICE)
            yield f"precision: bf16 instead of fp32: {format_bytes(peak)} on the device"
    if policies.adapter is None:
        with_lora = replace(policies, adapter=lora)
        if _fits(with_lora, pricing, limits):
            peak = pricing.bill(with_lora, full_depth=True).peak_bytes(Tier.DEVICE)
            yield f"LoRA (allow: [lora]): {format_bytes(peak)} on the device"
    bill = pricing.bill(policies, full_depth=True)
    needed = -(-bill.peak_bytes(Tier.DEVICE) // MIB)
    if replace(limits, device_bytes=needed * MIB).missing_bytes(bill) <= 0:
        yield f"the same plan with memory_limit: {needed}MiB"


def _longest_sequence_that_fits(policies: Policies, pricing: Pricing, limits: Limits) -> int | None:
    """By halving; None if even the shortest does not fit."""
    length = pricing.workload.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        workload = replace(
            pricing.workload,
            sequence_length=length,
            evaluation_sequence_length=min(length, pricing.workload.evaluation_sequence_length),
        )
        shorter = Pricing(pricing.plain, pricing.config, workload, pricing.rates)
        if _fits(policies, shorter, limits):
            return length
        length //= 2
    return None
