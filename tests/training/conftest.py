"""Small jobs on the tiny model, with rates that need no measuring."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tightfit.facts.job import Job
from tightfit.planner import prepared
from tightfit.planner.plan import Plan
from tightfit.planner.rates import Rates
from tightfit.training.run import PreparedRun, RunResult, make_plan, prepare, train


@pytest.fixture(scope="session")
def rates() -> Rates:
    return Rates(
        **{
            field.name: 1e-6 if field.name.endswith("operation_seconds") else 1e10
            for field in dataclasses.fields(Rates)
            if field.type == "float"
        }
    )


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    monkeypatch.setattr(prepared, "measure_rates", lambda device, dtype: rates)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven conversations of different lengths."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with path.open("w") as file:
        for index in range(11):
            question = f"What is number {index}? " + "Say more. " * (index % 4)
            answer = "It is " + "very " * (index % 5) + f"number {index}."
            turns = [("user", question), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    prepared: PreparedRun
    plan: Plan
    result: RunResult

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.result.records]


MakeJob = Callable[..., Job]
RunJob = Callable[..., Run]


@pytest.fixture
def job(tiny_model_folder: Path, rows: Path, tmp_path: Path) -> MakeJob:
    """A job of four steps of two conversations each, unless keys say otherwise."""

    def make(**keys: Any) -> Job:
        defaults = {
            "model_name_or_path": str(tiny_model_folder),
            "dataset": str(rows),
            "output_dir": str(tmp_path / "run"),
            "train_batch_size": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
        }
        return Job(**(defaults | keys))

    return make


PLAIN = {
    "loss": "full",
    "gradient_checkpointing": "false",
    "offload_optimizer": "none",
    "per_device_train_batch_size": 2,
}
TIGHT = {
    "loss": "chunked",
    "gradient_checkpointing": "true",
    "offload_optimizer": "cpu",
    "per_device_train_batch_size": 1,
}


@pytest.fixture
def run_job(job: MakeJob, no_measuring: None) -> RunJob:
    """Prepares, plans and trains; every technique off unless keys say otherwise."""

    def run(**keys: Any) -> Run:
        made = job(**(PLAIN | keys))
        prepared = prepare(made)
        plan = make_plan(prepared)
        return Run(prepared, plan, train(prepared, plan, []))

    return run


@pytest.fixture(scope="session")
def plain() -> dict[str, object]:
    return dict(PLAIN)


@pytest.fixture(scope="session")
def tight() -> dict[str, object]:
    return dict(TIGHT)
