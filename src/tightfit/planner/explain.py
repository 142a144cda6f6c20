"""Says in plain words why a plan has its techniques, and which keys have done nothing.

Every number is that of a dry run with one thing changed, or what is known without one: a lower
bound where that is already too much for the device, or a closed form (`closed_reasons.py`). Knows
nothing of how plans are found.
"""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.bill.table import MemoryTable
from tightfit.errors import UnsupportedError
from tightfit.facts.job import Job
from tightfit.planner.closed_reasons import closed_reasons
from tightfit.planner.options import without_technique
from tightfit.planner.plan import Limits, StepTime
from tightfit.planner.pricing import Pricing
from tightfit.policies import Policies, Tier
from tightfit.units import format_bytes, format_seconds

_SECONDS_PER_DAY = 24 * 60 * 60
_WORTH_NAMING = 0.01  # of a step


def reasons_for(policies: Policies, pricing: Pricing, limits: Limits) -> Iterator[str]:
    """One sentence for each technique: what it saves here and what it costs.

    A technique without which a bound is over the device's limit is not priced without it: that
    takes seconds, and the bound says why the technique is there.
    """
    bill, seconds = pricing.bill(policies), pricing.step_time(policies).total
    peak = bill.peak_bytes(Tier.DEVICE)
    for name, without in without_technique(policies):
        try:
            other, is_bound = _bill_without(without, pricing, limits)
        except UnsupportedError as error:
            yield f"{name}: the rest does not go without it ({error})"
            continue
        saved = other.peak_bytes(Tier.DEVICE) - peak
        cost = seconds - pricing.step_time(without).total
        over = limits.missing_bytes(other)
        least, most = ("at least ", "at most ") if is_bound else ("", "")
        needed = (
            f"without it {least}{format_bytes(over)} would be missing"
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
        moved = without.placement != policies.placement
        elsewhere = _elsewhere(bill, other, most) if moved else ""
        device = f"{least}{format_bytes(saved)} less on the device"
        yield f"{name}: {device}, {elsewhere}{price}; {needed}"
    yield from closed_reasons(policies, pricing, limits)
    yield from _wear(policies, pricing)


def _bill_without(without: Policies, pricing: Pricing, limits: Limits) -> tuple[MemoryTable, bool]:
    """The bill of these, or what is known to be on it at least; and whether it is that.

    Raises:
        UnsupportedError: the engine cannot do them with this model.
    """
    device = Limits(device_bytes=limits.device_bytes)
    least = pricing.least_bill(without)
    if not pricing.was_run(without) and device.missing_bytes(least) > 0:
        return least, True
    return pricing.bill(without), False


def _elsewhere(bill: MemoryTable, without: MemoryTable, most: str) -> str:
    """What the other tiers have more because something has left the device."""
    host = sum(
        bill.peak_bytes(tier) - without.peak_bytes(tier) for tier in (Tier.HOST, Tier.PINNED)
    )
    more = {"the host": host, "nvme": bill.peak_bytes(Tier.NVME) - without.peak_bytes(Tier.NVME)}
    return "".join(f"{most}{format_bytes(n)} more on {name}, " for name, n in more.items() if n > 0)


def _wear(policies: Policies, pricing: Pricing) -> Iterator[str]:
    """What a disk has to take: an SSD may be written to so many times and no more."""
    written = pricing.traffic(policies).written_bytes
    if written:
        steps = _SECONDS_PER_DAY / pricing.step_time(policies).total
        yield (
            f"{format_bytes(round(written))} are written to nvme in each step, "
            f"{format_bytes(round(written * steps))} in a day of training"
        )


_PARTS = {
    "compute": "computing",
    "recompute": "computing layers again",
    "optimizer": "the optimizer's update",
    "copies": "copies between device and host",
    "overhead": "starting operations",
    "disk": "the disk",
    "communication": "waiting for other ranks",
    "bubble": "stages that stand idle",
}


def bottleneck(bill: MemoryTable, time: StepTime, limits: Limits) -> str:
    """What takes most of a step and what comes next, and the memory that is nearest to its limit:
    where a faster or larger part would help, and where none would."""
    shares = sorted(
        ((seconds / time.total, _PARTS[name]) for name, seconds in time.__dict__.items()),
        reverse=True,
    )
    (most, first), (less, second) = shares[:2]
    said = f"{first} takes {most:.0%} of a step"
    if less >= _WORTH_NAMING:
        said += f", then {second} {less:.0%}"
    use = limits.tightest(bill)
    if use is not None:
        need, limit = format_bytes(use.need_bytes), format_bytes(use.limit_bytes)
        said += f"; of memory {use.name} is nearest to its limit ({need} of {limit})"
    return said


def without_effect(job: Job, policies: Policies) -> Iterator[str]:
    """One sentence for each key that does nothing here: it says how something leaves the device
    that does not leave, or what to do about waiting where nobody waits."""
    if job.adapt and job.ranks == 1:
        yield "adapt: true has no effect, as one rank waits for nobody"
    placement = policies.placement
    states = placement.optimizer_states is not Tier.DEVICE
    parameters = placement.parameters is not Tier.DEVICE
    activations = placement.activations is not Tier.DEVICE
    for key, acts, staying, instead in (
        ("offload_optimizer_fraction", states, "optimizer states stay", "offload_optimizer: cpu"),
        ("lazy_step", states, "optimizer states stay", "offload_optimizer: cpu"),
        ("offload_param_fraction", parameters, "parameters stay", "offload_param: cpu"),
        (
            "offload_prefetch",
            parameters or activations,
            "parameters and activations stay",
            "offload_param: cpu or offload_activations: true",
        ),
    ):
        value = getattr(job, key)
        if value not in ("auto", "false") and not acts:
            yield (
                f"{key}: {value} has no effect, as {staying} on the device; {instead} "
                "makes them leave"
            )
