"""The largest model of the catalogue that a machine can train, and with which plan.

For all parameters, for LoRA and for QLoRA, each apart, unless the job says which. Models are tried
by their number of parameters, as if one with more took more memory: of two that are nearly as large
the other one may fit too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.errors import DoesNotFitError
from tightfit.facts.catalogue import CatalogueEntry, catalogue_names, find_in_catalogue
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.workload import planned_workload
from tightfit.planner.other_jobs import largest_that_fits, parameters_of
from tightfit.planner.plan import Plan
from tightfit.planner.prepared import Prepared, prepare
from tightfit.planner.pricing import Config, Observe, nobody
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job

_WAYS: dict[str, dict[str, object]] = {
    "all parameters": {"finetuning_type": "full", "quantization_bit": None},
    "LoRA": {"finetuning_type": "lora", "quantization_bit": None},
    "QLoRA": {"finetuning_type": "lora", "quantization_bit": 4},
}


@dataclass(frozen=True)
class Largest:
    """The largest model of one way to train.

    Attributes:
        way: to train.
        model: of the catalogue; None where none fits.
        parameters: of the model.
        plan: how; None where none fits.
    """

    way: str
    model: str | None
    parameters: int
    plan: Plan | None

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        plan = None if self.plan is None else self.plan.to_json()
        return {"way": self.way, "model": self.model, "parameters": self.parameters, "plan": plan}


def largest_models(job: Job, hardware: Hardware, observe: Observe = nobody) -> Iterator[Largest]:
    """For each way to train that the job leaves open.

    Args:
        job: whose model does not matter.
        observe: told of all policies that are about to be priced.
    """
    workload = planned_workload(job)

    rates: Rates | None = None

    def elsewhere(other: Job, model: Config) -> Prepared:
        nonlocal rates  # of this machine: what fits does not depend on them, so once is enough
        found = prepare(other, model, workload, hardware, rates, observe, None)
        rates = found.pricing.rates
        return found

    models = models_by_size()
    for way, keys in _WAYS.items():
        given = job.model_fields_set & keys.keys()
        if any(getattr(job, key) != keys[key] for key in given):
            continue
        this = job.model_copy(update=keys)
        candidates = list(models)
        while (found := largest_that_fits(candidates, this, elsewhere)) is not None:
            entry = find_in_catalogue(found.name)
            assert entry is not None
            named = this.model_copy(update={"model_name_or_path": entry.name})
            try:
                plan = plan_job(named, entry.config, workload, hardware, observe=observe)
            except DoesNotFitError:  # at full depth, by a little
                candidates = candidates[: candidates.index(entry)]
                continue
            yield Largest(way, entry.name, parameters_of(entry), plan)
            break
        else:
            yield Largest(way, None, 0, None)


def models_by_size() -> list[CatalogueEntry]:
    """The catalogue from the smallest to the largest, one for each number of parameters."""
    by_size: dict[int, CatalogueEntry] = {}
    for name in catalogue_names():
        entry = find_in_catalogue(name)
        assert entry is not None
        by_size.setdefault(parameters_of(entry), entry)
    return [entry for count, entry in sorted(by_size.items()) if count]
