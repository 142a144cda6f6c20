"""Jobs near one that does not fit: a smaller model of the same family, more RAM, more cards.

Models are those of the catalogue; a model that it does not have, like a folder, has no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from tightfit.errors import ConfigError, InputError, UnsupportedError
from tightfit.facts.catalogue import CatalogueEntry, family_of, find_in_catalogue
from tightfit.facts.job import Job
from tightfit.facts.model_spec import ModelSpec
from tightfit.facts.parameter_count import ParameterCounts
from tightfit.planner.more_ram import more_ram
from tightfit.planner.nothing_fits import Instead
from tightfit.planner.prepared import Prepared
from tightfit.planner.pricing import Config
from tightfit.planner.purchases import more_cards
from tightfit.policies import Policies

Elsewhere: TypeAlias = Callable[[Job, Config], Prepared]


def other_jobs(at: Prepared, elsewhere: Elsewhere) -> Iterator[Instead]:
    """Those that would fit, the largest of each kind of model."""
    own = find_in_catalogue(at.job.model_name_or_path)
    if own is not None:
        for kind in (False, True):
            smaller = [one for one in _smaller(own) if _has_experts(one) is kind]
            found = largest_that_fits(smaller, at.job, elsewhere)
            if found is not None:
                yield found
    yield from more_ram(at, leanest_allowed(at))
    for name, job in more_cards(at.job):
        try:
            there = elsewhere(job, at.pricing.config)
        except (ConfigError, UnsupportedError):
            continue
        yield Instead(name, leanest_allowed(there), there.fitting)


def largest_that_fits(
    models: Sequence[CatalogueEntry], job: Job, elsewhere: Elsewhere
) -> Instead | None:
    """Of models from the smallest to the largest the last that fits; by bisection, as if one that
    is larger took more. Those that the engine cannot train as the job says are left out."""
    left, found, low, high = list(models), None, 0, len(models)
    while low < high:
        middle = (low + high) // 2
        try:
            fitting = _leanest_that_would(left[middle], job, elsewhere)
        except InputError:
            del left[middle]
            high -= 1
            continue
        if fitting is None:
            high = middle
        else:
            found, low = fitting, middle + 1
    return found


def leanest_allowed(at: Prepared) -> list[Policies]:
    """Of each way that the job allows."""
    ways = (at.options.own, *at.options.allowed)
    return [policies for way in ways for policies in at.leanest(way)]


def _leanest_that_would(entry: CatalogueEntry, job: Job, elsewhere: Elsewhere) -> Instead | None:
    """The job with that model; None where it would not fit.

    Raises:
        InputError: the engine cannot train that model as the job says.
    """
    there = elsewhere(job.model_copy(update={"model_name_or_path": entry.name}), entry.config)
    there.pricing.counts(there.options.plain())  # or it would look as if it did not fit
    lean = leanest_allowed(there)
    if there.fitting.first_that_would(lean) is None:
        return None
    return Instead(entry.name, lean, there.fitting)


def _smaller(own: CatalogueEntry) -> list[CatalogueEntry]:
    """Of the same family, from the smallest; of those with the same shape the first alone."""
    most = parameters_of(own)
    by_size = {parameters_of(entry): entry for entry in reversed(family_of(own.name))}
    return [entry for count, entry in sorted(by_size.items()) if 0 < count < most]


def parameters_of(entry: CatalogueEntry) -> int:
    """How many a model has; 0 where there is no closed form."""
    counts = _counts(entry)
    return 0 if counts is None else counts.total


def _has_experts(entry: CatalogueEntry) -> bool:
    counts = _counts(entry)
    return counts is not None and counts.active < counts.total


def _counts(entry: CatalogueEntry) -> ParameterCounts | None:
    return ModelSpec(entry.name, "catalogue", entry.config).parameter_counts()
