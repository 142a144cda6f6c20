"""Says in plain words why a plan has its techniques, and what would help when nothing fits.

Every number is that of a dry run with one thing changed. Knows nothing of how plans are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tightfit.bill.table import MemoryTable
from tightfit.errors import DoesNotFitError
from tightfit.planner.options import without_technique
from tightfit.planner.plan import Candidate, Limits, count_techniques, describe_policies
from tightfit.planner.pricing import Pricing
from tightfit.policies import AdapterPolicy, Policies, Tier
from tightfit.units import format_bytes, format_seconds

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
    turned_down: Sequence[Candidate], pricing: Pricing, limits: Limits
) -> DoesNotFitError:
    """The error that says how much is missing and names the nearest plan that would fit."""
    policies, bill = _smallest(turned_down, pricing)
    missing = limits.missing_bytes(bill)
    lines = [
        f"nothing fits: the smallest plan ({describe_policies(policies)}) needs "
        f"{format_bytes(bill.peak_bytes(Tier.DEVICE))} on the device and "
        f"{format_bytes(bill.peak_bytes(Tier.HOST))} on the host, {format_bytes(missing)} more "
        "than the limit.",
        *(f"  would fit: {line}" for line in _nearest(policies, bill, pricing, limits)),
    ]
    return DoesNotFitError("\n".join(lines), missing)


def _smallest(turned_down: Sequence[Candidate], pricing: Pricing) -> tuple[Policies, MemoryTable]:
    """The candidate with the lowest device peak, of equal ones the one with fewest techniques."""
    priced = [(c.policies, c.bill or pricing.bill(c.policies)) for c in turned_down]
    return min(
        priced, key=lambda pair: (pair[1].peak_bytes(Tier.DEVICE), count_techniques(pair[0]))
    )


def _nearest(
    policies: Policies, bill: MemoryTable, pricing: Pricing, limits: Limits
) -> Iterator[str]:
    """What would fit, from what changes least."""
    shorter = _longest_sequence_that_fits(policies, pricing, limits)
    if shorter is not None:
        yield f"cutoff_len: {shorter} instead of {pricing.workload.sequence_length}"
    if policies.adapter is None:
        with_lora = replace(policies, adapter=AdapterPolicy())
        lora_bill = pricing.bill(with_lora)
        if limits.missing_bytes(lora_bill) <= 0:
            yield (
                f"LoRA (allow: [lora]): {format_bytes(lora_bill.peak_bytes(Tier.DEVICE))} "
                "on the device"
            )
    if limits.device_bytes is not None:
        needed = bill.peak_bytes(Tier.DEVICE)
        yield f"the same plan with memory_limit: {-(-needed // 2**20)}MiB"


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
        if limits.missing_bytes(shorter.bill(policies)) <= 0:
            return length
        length //= 2
    return None
