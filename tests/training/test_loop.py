"""Schedules, what is due when, and steps whose gradients are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError, TrainingError
from tightfit.facts.job import Job
from tightfit.training import loop
from tightfit.training.loop import Schedule, check_scheduler

RunJob = Callable[..., Any]


def job(**keys: Any) -> Job:
    return Job(**{"model_name_or_path": "m", "train_batch_size": 4, **keys})


@pytest.mark.parametrize(
    ("keys", "samples", "per_epoch", "total"),
    [
        ({}, 8, 2, 6),
        ({}, 9, 3, 9),
        ({"num_train_epochs": 0.5}, 16, 4, 2),
        ({"num_train_epochs": 0.01}, 16, 4, 1),
        ({"num_train_epochs": 1.5}, 9, 3, 5),
        ({"max_steps": 7}, 9, 3, 7),
        ({"max_steps": 0}, 8, 2, 6),
    ],
)
def test_steps(keys: dict[str, Any], samples: int, per_epoch: int, total: int) -> None:
    assert Schedule.of(job(**keys), samples) == Schedule(per_epoch, total)


def test_what_is_due() -> None:
    schedule = Schedule(steps_per_epoch=3, total_steps=8)
    steps = range(1, 9)
    keys = {"eval_steps": 2, "save_steps": 4}

    def evaluations(strategy: str) -> list[int]:
        made = job(eval_strategy=strategy, **keys)
        return [step for step in steps if schedule.evaluations_due(made, step)]

    def saves(strategy: str) -> list[int]:
        made = job(save_strategy=strategy, **keys)
        return [step for step in steps if schedule.save_due(made, step)]

    assert evaluations("no") == []
    assert evaluations("steps") == [2, 4, 6], "after the last step it is evaluated anyway"
    assert evaluations("epoch") == [3, 6]
    assert saves("no") == [8]
    assert saves("steps") == [4, 8]
    assert saves("epoch") == [3, 6, 8]


@pytest.mark.parametrize(
    "name", ["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"]
)
def test_schedules_that_work(name: str) -> None:
    check_scheduler(job(lr_scheduler_type=name, warmup_steps=2), 10)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 1e-6}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-6}),
        ("inverse_sqrt", {"timescale": 5}),
    ],
)
def test_schedules_with_numbers_of_their_own_are_those_of_transformers(
    name: str, own: dict[str, Any]
) -> None:
    made = job(lr_scheduler_type=name, lr_scheduler_kwargs=json.dumps(own), warmup_steps=2)
    assert made.lr_scheduler_kwargs == own
    check_scheduler(made, 10)
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=made.learning_rate) for _ in range(2)]
    ours = loop._scheduler(made, optimizers[0], 10)
    theirs = get_scheduler(name, optimizers[1], 2, 10, own)
    for _ in range(10):
        assert ours.get_last_lr() == theirs.get_last_lr()
        for each in (ours, theirs):
            each.optimizer.step()
            each.step()


def test_numbers_that_a_schedule_does_not_have_are_named() -> None:
    made = job(lr_scheduler_type="linear", lr_scheduler_kwargs={"min_lr": 1e-6})
    with pytest.raises(ConfigError, match=r"lr_scheduler_type: linear .*min_lr"):
        check_scheduler(made, 10)
    with pytest.raises(ValueError, match="is no JSON like"):
        job(lr_scheduler_kwargs="{min")


@pytest.mark.parametrize(
    "name", ["linaer", "", "reduce_lr_on_plateau", "cosine_with_min_lr", "warmup_stable_decay"]
)
def test_schedules_that_do_not(name: str) -> None:
    with pytest.raises(ConfigError, match="lr_scheduler_type: "):
        check_scheduler(job(lr_scheduler_type=name), 10)


def test_the_learning_rate_of_each_step(run_job: RunJob) -> None:
    run = run_job(max_steps=4, warmup_steps=0.5, learning_rate=1e-3)
    rates = [record.learning_rate for record in run.result.records]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5e-4])


def test_evaluations_before_during_and_after(run_job: RunJob) -> None:
    run = run_job(max_steps=5, val_size=2, eval_strategy="steps", eval_steps=2)
    assert [evaluation.step for evaluation in run.result.evaluations] == [0, 2, 4, 5]


def break_steps(monkeypatch: pytest.MonkeyPatch, broken: set[int]) -> None:
    """In these steps (counted from 1) the gradients are not finite."""
    backward, count = Engine.backward, [0]

    def poisoned(self: Engine, loss: torch.Tensor) -> None:
        count[0] += 1
        backward(self, loss * math.inf if count[0] in broken else loss)

    monkeypatch.setattr(Engine, "backward", poisoned)


def test_a_step_that_is_not_finite_is_skipped_and_training_goes_on(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_steps(monkeypatch, {2, 3, 5})
    run = run_job(max_steps=6, logging_steps=100)
    assert [r.step for r in run.result.records if r.skipped] == [2, 3, 5]
    log = (run.prepared.output_dir / "trainer_log.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in log.splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 5], "a skipped step is always written"
    assert {line["grad_norm"] for line in lines} == {None}


def test_too_many_such_steps_end_the_run(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    break_steps(monkeypatch, {1, 3, 4, 5, 6, 7})
    with pytest.raises(TrainingError, match=r"5 steps in a row.*step 7.*lower learning_rate"):
        run_job(max_steps=20)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_logging_steps(run_job: RunJob, every: int) -> None:
    run = run_job(max_steps=6, logging_steps=every)
    log = (run.prepared.output_dir / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(every, 7, every))
