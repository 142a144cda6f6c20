"""Which of many candidates is taken, and what is asked for to know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tightfit.facts.job import Job
from tightfit.planner.first_fit import EQUAL_TIMES, FirstFit
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.fractions import fraction_of, with_fraction
from tightfit.planner.options import Options, options_of
from tightfit.planner.plan import Limits
from tightfit.planner.pricing import Pricing
from tightfit.planner.words import count_techniques
from tightfit.policies import Policies, Tier


@dataclass
class Scripted(Fitting):
    """All fits by a few layers, at full depth what is not in `deeper`; remembers what was asked."""

    deeper: set[Policies] = field(default_factory=set)
    whole: list[Policies] = field(default_factory=list)

    def fits_few_layers(self, policies: Policies) -> bool:
        return True

    def fits_whole(self, policies: Policies) -> bool:
        self.whole.append(policies)
        return policies not in self.deeper


@pytest.fixture
def options(job: Callable[..., Job]) -> Options:
    return options_of(job(train_batch_size=8), precision="fp32", chunked_loss=True)


@pytest.fixture
def candidates(options: Options) -> list[Policies]:
    return [policies for policies in options.candidates() if possible(policies)]


def best(pricing: Pricing, candidates: list[Policies]) -> tuple[int, float]:
    """Techniques and seconds of what is to be taken."""
    seconds = {policies: pricing.step_time(policies).total for policies in candidates}
    limit = min(seconds.values()) * EQUAL_TIMES
    return min((count_techniques(p), its) for p, its in seconds.items() if its <= limit)


def test_only_what_is_taken_is_run_at_full_depth(
    pricing: Pricing, options: Options, candidates: list[Policies]
) -> None:
    fitting = Scripted(pricing, Limits())
    found = FirstFit(options, fitting).of(candidates)
    assert found is not None
    assert fitting.whole == [found]
    took = count_techniques(found), pricing.step_time(found).total
    assert took == best(pricing, candidates)


def test_what_does_not_fit_at_full_depth_gives_way_to_what_it_had_displaced(
    pricing: Pricing, options: Options, candidates: list[Policies]
) -> None:
    """Again and again, until nothing is left; nothing is lost on the way, and none comes twice."""
    fitting = Scripted(pricing, Limits())
    left = list(candidates)
    while left:
        found = FirstFit(options, fitting).of(candidates)
        assert found in left
        took = count_techniques(found), pricing.step_time(found).total
        assert took == best(pricing, left)
        fitting.deeper.add(found)
        left.remove(found)
    fitting.whole.clear()
    assert FirstFit(options, fitting).of(candidates) is None
    assert len(fitting.whole) == len(set(fitting.whole)) == len(candidates)


def test_a_fraction_that_a_bound_turns_down_asks_for_no_bill(
    pricing: Pricing, options: Options, candidates: list[Policies]
) -> None:
    """What a bound says is missing on the device leaves too."""
    fresh = Pricing(pricing.plain, pricing.config, pricing.workload, pricing.rates)
    whole = next(p for p in candidates if options.open_fraction(p) == "optimizer_fraction")
    half = with_fraction(whole, "optimizer_fraction", fraction_of(1, 2))
    fitting = Fitting(fresh, Limits(fresh.least_bill(half).peak_bytes(Tier.DEVICE) - 1))
    first = FirstFit(options, fitting)
    entry = first._entry(0, whole, "optimizer_fraction", layers=1, tries=1)
    assert first._policies(entry) == half
    (following,) = first._following(entry)
    assert (following.layers, following.tries) == (2, 2)
    assert not fresh.was_run(half)
