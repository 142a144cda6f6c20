"""What the search left behind for its time: of every other kind of plan the fastest, and its time.

A kind is another way to share the job out, a technique that is open and not used, or one that the
job allows for when nothing else fits. All of it is closed forms: no bill is asked for, and that one
of these fits is not known, only that nothing says that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from tightfit.facts.machine import machine_of
from tightfit.planner.described_rates import described_rates
from tightfit.planner.first_fit import FirstFit
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.options import Way
from tightfit.planner.placements import uses_disk
from tightfit.planner.plan import Slower
from tightfit.planner.prepared import Prepared
from tightfit.planner.stage_bounds import uncut
from tightfit.policies import LossKind, Policies, ShardingPolicy, Tier
from tightfit.units import format_seconds

_OF_NUMBERS = "it changes the numbers, so it is taken only where nothing else fits"


def slower_than(at: Prepared, chosen: Policies) -> Iterator[Slower]:
    """One for each kind that the plan is not of, where there may be one that fits; what was turned
    down is none.

    Args:
        chosen: the policies of the plan.
    """
    seconds = at.pricing.step_time(chosen).total
    here = FirstFit(at.options, at.fitting)
    yield from _nearest_on_one_card(at, chosen, seconds)
    kinds = _kinds(at, chosen)
    first = here.first_of_each(kinds, seconds)
    for kind in dict.fromkeys(chain.from_iterable(kinds.values())):
        if kind in first:
            # Nothing is taken for faster because it leaves the device (`first_fit.py`).
            own = max(seconds, at.pricing.step_time(first[kind]).total)
            yield Slower(kind, first[kind], own, compared(own, seconds))
    for way in at.options.allowed:
        if not way.has(chosen):
            yield from _allowed(at, here, way, seconds)


def compared(own: float, seconds: float) -> str:
    """Why a plan was not taken that takes `own` seconds of a step, beside one that takes
    `seconds`."""
    takes, plan = format_seconds(own), format_seconds(seconds)
    if takes == plan:
        return f"no faster: {plan}"
    return f"{'slower' if own > seconds else 'faster, if it fits'}: {takes}, this plan {plan}"


def _kinds(at: Prepared, chosen: Policies) -> Mapping[Policies, list[str]]:
    """The candidates that share the job out in another way, with that way, and those that share it
    out alike, with each technique that the plan has not."""
    kinds = {}
    own, used = uncut(chosen.sharding), set(_techniques(chosen))
    for policies in at.options.candidates(at.options.way_of(chosen)):
        if uses_disk(policies.placement) != uses_disk(chosen.placement) or not possible(policies):
            continue
        if uncut(policies.sharding) == own:
            names = [name for name in _techniques(policies) if name not in used]
        else:
            name = sharing_out(policies.sharding)
            names = [] if name == sharing_out(own) else [name]
        if names:
            kinds[policies] = names
    return kinds


def sharing_out(sharding: ShardingPolicy) -> str:
    """A way to share a job out among ranks, whatever the sizes of its groups."""
    if sharding.ranks == 1:
        return "one card"
    groups = {
        "tensor parallel": sharding.tensor_parallel,
        "pipeline": sharding.pipeline_parallel,
        "replicas of shards": sharding.replicas,
    }
    found = [name for name, size in groups.items() if size > 1]
    if found:
        return " with ".join(found)
    return f"ZeRO-{sharding.zero_stage}" if sharding.zero_stage else "data parallel"


def _techniques(policies: Policies) -> Iterator[str]:
    placement = policies.placement
    if policies.batch.accumulation_steps > 1:
        yield "accumulation"
    if policies.loss.kind is not LossKind.FULL:
        yield f"{policies.loss.kind} loss"
    if policies.checkpointing.enabled:
        yield "gradient checkpointing"
    for name in ("optimizer_states", "parameters", "activations"):
        tier: Tier = getattr(placement, name)
        if tier is not Tier.DEVICE:
            yield f"{name.replace('_', ' ')} on {tier}"


def _nearest_on_one_card(at: Prepared, chosen: Policies, seconds: float) -> Iterator[Slower]:
    """The same global batch on one card of a machine that is described, which then has the host to
    itself; nobody knows how fast another number of the cards here would be."""
    machine = machine_of(at.job)
    if machine is None or chosen.sharding.ranks == 1:
        return
    alone = replace(machine, cards_per_node=1, nodes=1, network=None)
    rates = described_rates(alone, at.pricing.plain.precision.parameters)
    pricing = replace(at.pricing, rates=rates, machines=1)
    options = replace(at.options, shardings=(ShardingPolicy(),))
    there = FirstFit(options, Fitting(pricing, replace(at.fitting.limits, ranks=1)))
    candidates = [
        policies
        for policies in options.candidates(at.options.way_of(chosen))
        if possible(policies) and not uses_disk(policies.placement)
    ]
    found = there.first_that_could(candidates, 0.0)
    if found is not None:
        own = pricing.step_time(found).total
        yield Slower(sharing_out(found.sharding), found, own, compared(own, seconds))


def _allowed(at: Prepared, here: FirstFit, way: Way, seconds: float) -> Iterator[Slower]:
    """A way that the job allows; with a time where no dry run is needed to know it."""
    candidates = [
        policies
        for policies in at.options.candidates(way)
        if possible(policies) and not uses_disk(policies.placement)
    ]
    if not candidates:
        return
    if not at.pricing.has_counts(candidates[0]):
        yield Slower(way.name, None, None, _OF_NUMBERS)
        return
    found = here.first_that_could(candidates, 0.0)
    if found is not None:
        own = at.pricing.step_time(found).total
        said = f"{format_seconds(own)}, this plan {format_seconds(seconds)}; {_OF_NUMBERS}"
        yield Slower(way.name, found, own, said)
