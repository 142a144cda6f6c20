"""What would fit instead: a smaller model of the family, more cards; and the largest that fits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.conftest import make_hardware, make_job

from tightfit.engine.supported import engine_lacks
from tightfit.errors import DoesNotFitError, UnsupportedError
from tightfit.facts.catalogue import CatalogueEntry, find_in_catalogue
from tightfit.facts.job import Job
from tightfit.facts.workload import planned_workload
from tightfit.planner import fitting, largest
from tightfit.planner.largest import largest_models, models_by_size
from tightfit.planner.other_jobs import largest_that_fits, parameters_of
from tightfit.planner.plan import Plan
from tightfit.planner.search import plan_job
from tightfit.policies import Tier

TINY = {"cutoff_len": 16, "train_batch_size": 1}
# Few choices, so that there are few dry runs.
PINNED: dict[str, Any] = {
    "loss": "chunked", "gradient_checkpointing": True, "offload_optimizer": "none",
    "offload_param": "none", "offload_activations": False, "per_device_train_batch_size": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, not that of the other tests."""
    monkeypatch.setattr(fitting, "engine_lacks", engine_lacks)


def planned(model: str, **keys: Any) -> Plan:
    entry = find_in_catalogue(model)
    assert entry is not None
    job = make_job(model_name_or_path=model, **(TINY | keys))
    return plan_job(job, entry.config, planned_workload(job), make_hardware())


def nothing_fits(model: str, **keys: Any) -> str:
    with pytest.raises(DoesNotFitError) as raised:
        planned(model, **keys)
    return str(raised.value)


@pytest.mark.slow
def test_a_smaller_model_of_the_family_and_more_cards_are_named_and_fit() -> None:
    keys = {"gpu": "rtx-3060", "memory_limit": "4500MiB", "train_batch_size": 2} | PINNED
    said = nothing_fits("HuggingFaceTB/SmolLM2-360M", **keys)
    name = re.search(r"would fit: (HuggingFaceTB/SmolLM2-\w+): .+ on the device \(", said)
    assert name is not None, said
    assert name[1] == "HuggingFaceTB/SmolLM2-135M"
    assert planned(name[1], **keys).fits
    assert re.search(r"would fit: a second card: .+ on the device \(", said), said
    assert planned("HuggingFaceTB/SmolLM2-360M", **(keys | {"gpu": "2xrtx-3060"})).fits


@dataclass(frozen=True)
class Sized:
    """Of a job that is prepared: models fit that have no more parameters than the limit."""

    entry: CatalogueEntry
    most: int
    tried: list[str]

    cannot: str = ""
    options = SimpleNamespace(own="own", allowed=(), plain=lambda: "plain")

    @property
    def fitting(self) -> Any:
        return self

    @property
    def pricing(self) -> Any:
        return self

    def counts(self, policies: str) -> None:
        if self.entry.name == self.cannot:
            raise UnsupportedError("no such layer")

    def leanest(self, way: str) -> list[str]:
        return [self.entry.name]

    def first_that_would(self, names: list[str]) -> str | None:
        self.tried.extend(names)
        return names[0] if parameters_of(self.entry) <= self.most else None


@pytest.mark.parametrize("fitting", range(6))
def test_the_largest_is_found_by_bisection(fitting: int) -> None:
    models = models_by_size()[:5]
    sizes = [0, *map(parameters_of, models)]
    tried: list[str] = []

    def elsewhere(job: Job, config: Any) -> Any:
        entry = find_in_catalogue(job.model_name_or_path)
        assert entry is not None
        return Sized(entry, sizes[fitting], tried)

    found = largest_that_fits(models, job_of(), elsewhere)
    assert (found and found.name) == (models[fitting - 1].name if fitting else None)
    assert len(tried) <= 3


@pytest.mark.parametrize("cannot", range(5))
def test_a_model_that_the_engine_cannot_train_is_left_out(cannot: int) -> None:
    """Which is found out while it is prepared, or only when it is priced; what is larger may fit
    all the same."""
    models = models_by_size()[:5]

    def elsewhere(job: Job, config: Any) -> Any:
        entry = find_in_catalogue(job.model_name_or_path)
        assert entry is not None
        return Sized(entry, parameters_of(models[-1]), [], models[cannot].name)

    found = largest_that_fits(models, job_of(), elsewhere)
    assert found is not None
    assert found.name == models[3 if cannot == 4 else 4].name


def test_where_the_engine_can_train_no_model_none_fits() -> None:
    def elsewhere(job: Job, config: Any) -> Any:
        raise UnsupportedError("no such layer")

    assert largest_that_fits(models_by_size()[:3], job_of(), elsewhere) is None


def test_models_go_from_small_to_large_and_come_once() -> None:
    sizes = [parameters_of(entry) for entry in models_by_size()]
    assert len(sizes) > 100
    assert sizes == sorted(set(sizes))
    assert sizes[0] > 0


@pytest.mark.slow
def test_the_largest_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    family = ["HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M", "Qwen/Qwen2.5-0.5B",
              "HuggingFaceTB/SmolLM2-1.7B"]  # fmt: skip
    entries = [entry for name in family if (entry := find_in_catalogue(name)) is not None]
    monkeypatch.setattr(largest, "models_by_size", lambda: entries)
    keys: dict[str, Any] = {"gpu": "rtx-3060", "memory_limit": "5GiB"} | PINNED
    found = {one.way: one for one in largest_models(job_of(**keys), make_hardware())}
    assert list(found) == ["all parameters", "LoRA", "QLoRA"]
    for one in found.values():
        assert one.plan is not None
        assert one.plan.fits
        assert one.plan.bill.peak_bytes(Tier.DEVICE) <= 5 * 2**30
    sizes = [one.parameters for one in found.values()]
    assert sizes == sorted(sizes)
    assert found["all parameters"].model != family[-1]
    assert found["LoRA"].model == family[-1]


def test_a_way_that_the_job_gives_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "models_by_size", list)
    ways = [one.way for one in largest_models(job_of(finetuning_type="full"), make_hardware())]
    assert ways == ["all parameters"]
    none = list(largest_models(job_of(finetuning_type="lora"), make_hardware()))
    assert [(one.way, one.model) for one in none] == [("LoRA", None), ("QLoRA", None)]


def job_of(**keys: Any) -> Job:
    return make_job(**(TINY | {"gpu": "rtx-3060"} | keys))
