"""Says in plain words why a plan has its techniques, and what would help when nothing fits.

Every number is that of a dry run with one thing changed. Knows nothing of how plans are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tightfit.bill.table import MemoryTable
from tightfit.errors import DoesNotFitError, UnsupportedError
from tightfit.planner.options import with_adapter, without_technique
from tightfit.planner.plan import Limits
from tightfit.planner.pricing import Pricing
from tightfit.planner.words import count_techniques, describe_policies
from tightfit.policies import AdapterPolicy, Policies, PrecisionPolicy, Tier
from tightfit.units import MIB, format_bytes, format_seconds

_SHORTEST_SEQUENCE = 64
_SECONDS_PER_DAY = 24 * 60 * 60


def reasons_for(policies: Policies, pricing: Pricing, limits: Limits) -> Iterator[str]:
    """One sentence for each technique: what it saves here and what it costs."""
    bill, seconds = pricing.bill(policies), pricing.step_time(policies).total
    peak = bill.peak_bytes(Tier.DEVICE)
    for name, without in without_technique(policies):
        try:
            other = pricing.bill(without)
        except UnsupportedError as error:
            yield f"{name}: the rest does not go without it ({error})"
            continue
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
        elsewhere = _elsewhere(bill, other) if without.placement != policies.placement else ""
        yield f"{name}: {format_bytes(saved)} less on the device, {elsewhere}{price}; {needed}"
    yield from _wear(policies, pricing)


def _elsewhere(bill: MemoryTable, without: MemoryTable) -> str:
    """What the other tiers have more because something has left the device."""
    host = sum(
        bill.peak_bytes(tier) - without.peak_bytes(tier) for tier in (Tier.HOST, Tier.PINNED)
    )
    more = {"the host": host, "nvme": bill.peak_bytes(Tier.NVME) - without.peak_bytes(Tier.NVME)}
    return "".join(f"{format_bytes(n)} more on {name}, " for name, n in more.items() if n > 0)


def _wear(policies: Policies, pricing: Pricing) -> Iterator[str]:
    """What a disk has to take: an SSD may be written to so many times and no more."""
    written = pricing.traffic(policies).written_bytes
    if written:
        steps = _SECONDS_PER_DAY / pricing.step_time(policies).total
        yield (
            f"{format_bytes(round(written))} are written to nvme in each step, "
            f"{format_bytes(round(written * steps))} in a day of training"
        )


def nothing_fits(
    candidates: Sequence[Policies],
    lora: AdapterPolicy,
    pricing: Pricing,
    limits: Limits,
    no_disk: str | None = None,
) -> DoesNotFitError:
    """The error that says how much is missing and names the nearest plan that would fit.

    Args:
        candidates: what was turned down.
        lora: what could be tried as well if the job allowed it.
        no_disk: why nothing could go to nvme.
    """
    policies, bill = _nearest_miss(candidates, pricing, limits)
    missing = limits.missing_bytes(bill)
    lines = [
        f"nothing fits: the smallest plan ({describe_policies(policies)}) needs "
        f"{_needs(bill)}, {format_bytes(missing)} more than the limit ({limits.tightest(bill)}).",
        *([f"  nvme was not tried: {no_disk}"] if no_disk else []),
        *(f"  would fit: {line}" for line in _would_fit(policies, lora, pricing, limits)),
    ]
    return DoesNotFitError("\n".join(lines), missing)


def _needs(bill: MemoryTable) -> str:
    device, host, nvme = (
        bill.peak_bytes(Tier.DEVICE),
        bill.peak_bytes(Tier.HOST) + bill.peak_bytes(Tier.PINNED),
        bill.peak_bytes(Tier.NVME),
    )
    on_disk = f" and {format_bytes(nvme)} on nvme" if nvme else ""
    both = "," if nvme else " and"
    return f"{format_bytes(device)} on the device{both} {format_bytes(host)} on the host{on_disk}"


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
        with_lora = with_adapter(policies, lora)
        if _fits(with_lora, pricing, limits):
            peak = pricing.bill(with_lora, full_depth=True).peak_bytes(Tier.DEVICE)
            yield f"LoRA (allow: [lora]): {format_bytes(peak)} on the device"
    bill = pricing.bill(policies, full_depth=True)
    yield from _raised_limits(bill, limits)


def _raised_limits(bill: MemoryTable, limits: Limits) -> Iterator[str]:
    """The limit that is short, where it is one alone. RAM that is there cannot be raised."""
    device = _whole_mib(bill.peak_bytes(Tier.DEVICE))
    host = _whole_mib(limits.ranks * (bill.peak_bytes(Tier.HOST) + bill.peak_bytes(Tier.PINNED)))
    nvme = _whole_mib(limits.ranks * bill.peak_bytes(Tier.NVME))
    for key, needed, raised in (
        ("memory_limit", device, replace(limits, device_bytes=device * MIB)),
        ("host_memory_limit", host, replace(limits, host_bytes=host * MIB)),
        ("nvme_limit", nvme, replace(limits, nvme_bytes=nvme * MIB)),
    ):
        if raised.missing_bytes(bill) <= 0:
            yield f"the same plan with {key}: {needed}MiB"


def _whole_mib(count_bytes: int) -> int:
    return -(-count_bytes // MIB)


def _longest_sequence_that_fits(policies: Policies, pricing: Pricing, limits: Limits) -> int | None:
    """By halving; None if even the shortest does not fit, or model states alone do not."""
    if limits.missing_bytes(pricing.least_states(policies)) > 0:
        return None
    length = pricing.workload.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        workload = replace(
            pricing.workload,
            sequence_length=length,
            evaluation_sequence_length=min(length, pricing.workload.evaluation_sequence_length),
        )
        shorter = Pricing(pricing.plain, pricing.config, workload, pricing.rates, pricing.card)
        if _fits(policies, shorter, limits):
            return length
        length //= 2
    return None
