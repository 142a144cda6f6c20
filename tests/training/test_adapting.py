"""When a run changes its plan; and that it is then the run that does not."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.taken import asked_for, only
from tests.training.adapting_runs import RESULTS, STEPS, run_and_adapt
from tests.training.conftest import PLAIN
from tests.training.ranked_runs import LLAMA, on_ranks, save_model
from transformers import PreTrainedTokenizerFast

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import StepRecord
from tightfit.planner import prepared
from tightfit.planner.plan import Lighter, Limits, Plan, StepTime
from tightfit.planner.plan_file import read_policies, write_plan
from tightfit.planner.rates import Rates
from tightfit.policies import BatchPolicy, OptimizerPolicy, Policies, ShardingPolicy, Tier
from tightfit.training.adapting import Adapting, Trial, check_boundaries
from tightfit.training.loop import Schedule
from tightfit.training.output import LOG, PLAN, TRIED
from tightfit.training.run import _without_tried, make_plan, prepare

LAST = 5  # the third step has one sequence: an epoch of 9 in batches of 4
LORA: dict[str, Any] = {"finetuning_type": "lora", "lora_rank": 2, "lora_dropout": 0.2}
AWAY: dict[str, Any] = {"offload_optimizer": "cpu", "lazy_step": "true"}
NOTHING = 4096  # bytes, for which no model is small enough

Shared = tuple[ShardingPolicy, BatchPolicy]
# How two ranks share the work, with a global batch of four.
STAGE_0, STAGE_1, STAGE_2, STAGE_3 = (
    (ShardingPolicy(2, stage), BatchPolicy(1, 2)) for stage in range(4)
)
LARGER: Shared = (ShardingPolicy(2, 3), BatchPolicy(2, 1))
TENSOR: Shared = (ShardingPolicy(2, 0, tensor_parallel=2), BatchPolicy(1, 4))


@dataclass(frozen=True)
class Case:
    """One of the runs.

    Attributes:
        plans: what is gone through.
        said: what changes, in the words of the job's keys; as often as it does.
        limits: of ranks with all plans but the first.
        keys: of the job.
    """

    plans: tuple[Shared, ...]
    said: tuple[str, ...] = ()
    limits: dict[int, int] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


TO_1 = "zero_stage: 1 instead of 3"
TO_STAGE_3 = "zero_stage: 3 instead of 0, tensor_parallel_size: 1 instead of 2"
TO_LARGER = "per_device_train_batch_size: 2 instead of 1, the same global batch"
DOWN = ("zero_stage: 2 instead of 3", "zero_stage: 0 instead of 2")
BOTH = LORA | AWAY
CASES = {
    "plain": Case((STAGE_3,)),
    "one change": Case((STAGE_3, STAGE_1), (TO_1,)),
    "tensor ranks, then a larger batch": Case((TENSOR, STAGE_3, LARGER), (TO_STAGE_3, TO_LARGER)),
    "does not fit on one": Case((STAGE_3, STAGE_1), (TO_1,), {1: NOTHING}),
    "lora away": Case((STAGE_2,), keys=BOTH),
    "lora away, two changes": Case(
        (STAGE_2, STAGE_1, STAGE_0),
        ("zero_stage: 1 instead of 2", "zero_stage: 0 instead of 1"),
        keys=BOTH,
    ),
    "two changes": Case((STAGE_3, STAGE_2, STAGE_0), DOWN),
    "only a larger batch": Case((STAGE_3, LARGER), (TO_LARGER,)),
    "only tensor ranks": Case((TENSOR, STAGE_3), (TO_STAGE_3,)),
    "does not fit": Case((STAGE_3, STAGE_1), (TO_1,), {0: NOTHING, 1: NOTHING}),
    "lora": Case((STAGE_3,), keys=LORA),
    "lora, one change": Case((STAGE_3, STAGE_1), (TO_1,), keys=LORA),
    "away": Case((STAGE_2,), keys=AWAY),
    "away, one change": Case((STAGE_2, STAGE_1), ("zero_stage: 1 instead of 2",), keys=AWAY),
}
# For every day: each kind of change, and of what goes over to the other plan.
FEW = list(CASES)[:6]
ALL = only(FEW, CASES)
CHANGING = only(FEW, [name for name, case in CASES.items() if case.said])
IN_VAIN = only(FEW, [name for name, case in CASES.items() if case.limits])


def kind_of(name: str) -> str:
    """The case with the same keys that does not change."""
    keys = CASES[name].keys
    return next(other for other, case in CASES.items() if case.keys == keys)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
    rows: Path,
    rates: Rates,
    request: pytest.FixtureRequest,
) -> Path:
    """A folder for each case."""
    root = tmp_path_factory.mktemp("adapting")
    save_model(LLAMA, tokenizer, root / "model")
    keys: dict[str, Any] = PLAIN | {
        "model_name_or_path": str(root / "model"),
        "dataset": str(rows),
        "num_gpus": 2,
        "train_batch_size": 4,
        "per_device_train_batch_size": 1,
        "val_size": 2,
        "max_steps": LAST,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "sample_prompt": "What is number 3?",
        "max_new_tokens": 2,
        "output_dir": str(root / "unused"),
    }
    work = []
    plans: dict[str, Plan] = {}
    alone = {"num_gpus": 1, "per_device_train_batch_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "measure_rates", lambda device, dtype: rates)
        for name in chosen(request):
            case, kind = CASES[name], kind_of(name)
            job = keys | case.keys
            if kind not in plans:
                plans[kind] = make_plan(prepare(Job(**(job | alone))))
            plan = chain(plans[kind], case.plans)
            work.append((job | {"adapt": True}, plan, root / name, case.limits))
    on_ranks(2, work, root, run_and_adapt)
    return root


def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Cases that were chosen to run, each after that which does not change, and one to resume."""
    names = ["one change", *asked_for(request, "name")]
    return list(dict.fromkeys(each for name in names for each in (kind_of(name), name)))


def chain(plan: Plan, shared: tuple[Shared, ...]) -> Plan:
    """A plan with what is shared first, which leads to that of the next, and so on. Their bills are
    not looked at."""
    (sharding, batch), *later = shared
    first = replace(plan, policies=replace(plan.policies, sharding=sharding, batch=batch))
    if not later:
        return first
    return replace(first, lighter=Lighter(chain(plan, tuple(later)), sent=0.1))


def results(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / name / RESULTS).read_text())
    return found


def in_file(path: Path) -> Shared:
    """What a file of a plan says of it."""
    policies = read_policies(path, OptimizerPolicy())
    return policies.sharding, policies.batch


@pytest.mark.parametrize("name", CHANGING)
def test_it_is_the_run_that_does_not_change(folders: Path, name: str) -> None:
    one, other = results(folders, kind_of(name)), results(folders, name)
    assert one["changes"] == [], "there is nothing to change to"
    same_padding = () if LARGER in CASES[name].plans else ("tokens",)
    assert [step["step"] for step in other["steps"]] == list(range(1, LAST + 1))
    for mine, its in zip(one["steps"], other["steps"], strict=True):
        assert math.isclose(mine["loss"], its["loss"], rel_tol=1e-5)
        assert math.isclose(mine["grad_norm"], its["grad_norm"], rel_tol=1e-4)
        for exact in ("epoch", "learning_rate", *same_padding):
            assert mine[exact] == its[exact]
    assert [e["step"] for e in other["evaluations"]] == [0, LAST]
    for mine, its in zip(one["evaluations"], other["evaluations"], strict=True):
        assert math.isclose(mine["loss"], its["loss"], rel_tol=1e-5)
    assert other["answers"] == one["answers"]


@pytest.mark.parametrize("name", ALL)
def test_each_change_is_made_once_and_told_everywhere(folders: Path, name: str) -> None:
    folder, found, case = folders / name, results(folders, name), CASES[name]
    at = [(number + 1) * STEPS for number in range(len(case.said))]
    assert [change["step"] for change in found["changes"]] == at
    assert [change["what"] for change in found["changes"]] == list(case.said)
    for change, pair in zip(found["changes"], pairwise(case.plans), strict=True):
        for side, (sharding, batch) in zip(("before", "after"), pair, strict=True):
            assert change[side]["zero_stage"] == str(sharding.zero_stage)
            assert change[side]["tensor_parallel_size"] == str(sharding.tensor_parallel)
            micro, times = batch.micro_batch_size, batch.accumulation_steps
            assert change[side]["batch"] == f"{micro} x {times}"
        assert change["predicted_seconds"] < change["seconds"]
    log = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    events = [line for line in log if line["event"] == "plan"]
    if not case.limits:
        assert found["zero_stage"] == case.plans[-1][0].zero_stage
        assert [{"event": "plan", **change} for change in found["changes"]] == events
        assert in_file(folder / PLAN) == case.plans[-1]
        assert not (folder / TRIED).exists(), "a step was done with it"
        for said, step, what in zip(found["said"], at, case.said, strict=True):
            assert said.startswith(
                f"the plan changes after step {step}: {what}, as ranks wait for each other"
            )


def test_who_resumes_goes_on_with_the_plan_that_was_reached(
    folders: Path, rows: Path, no_measuring: None
) -> None:
    job = Job(
        model_name_or_path=str(folders / "model"), dataset=str(rows), num_gpus=2,
        train_batch_size=4, val_size=2, max_steps=LAST + 1, learning_rate=1e-3, resume=True,
        adapt=True, save_strategy="steps", save_steps=5, output_dir=str(folders / "one change"),
    )  # fmt: skip
    policies = make_plan(prepare(job)).policies
    assert (policies.sharding, policies.batch) == STAGE_1


@pytest.mark.parametrize("name", IN_VAIN)
def test_what_cannot_be_set_up_is_left_and_said(folders: Path, name: str) -> None:
    folder, found = folders / name, results(folders, name)
    assert found["zero_stage"] == 3
    (change,) = found["changes"]
    assert "limit" in change["failure"]
    assert (change["failure"].startswith("rank 1 failed")) == (name == "does not fit on one")
    first, second = found["said"]
    assert first.startswith("the plan changes after step 2")
    assert second == (
        f"the run goes on as before from the checkpoint of step 2, as {TO_1} "
        f"could not be set up: {change['failure']}"
    )
    assert in_file(folder / PLAN) == STAGE_3
    assert in_file(folder / TRIED) == STAGE_1, "so that a restart knows"


@pytest.mark.parametrize("name", CHANGING)
def test_the_memory_of_what_was_left_is_free_before_anything_is_opened(
    folders: Path, name: str
) -> None:
    found = results(folders, name)
    assert len(found["left"]) == (len(found["said"]))
    assert found["left"][0]["held"] > 10
    for left in found["left"]:
        assert left["objects"] == 0
        assert left["device_bytes"] == 0


# When


KEYS: dict[str, Any] = {
    "model_name_or_path": "m", "num_gpus": 2, "train_batch_size": 4, "adapt": True,
    "save_strategy": "steps",
}  # fmt: skip
BILL = MemoryTable({Phase.STEP: {Tier.DEVICE: {Kind.PARAMETERS: 100}}})


def plan_of(stage: int, lighter: Plan | None = None, given: tuple[str, ...] = ()) -> Plan:
    """A plan whose step computes for a second; the next sends half of it."""
    return Plan(
        policies=Policies(sharding=ShardingPolicy(2, stage)), bill=BILL, plain=BILL,
        step_time=StepTime(1.0, 0.0, 0.0, 0.0, 0.0), limits=Limits(), trainable_parameters=1,
        frozen_parameters=0, reasons=(), alternatives=(),
        lighter=None if lighter is None else Lighter(lighter, 0.5, given),
    )  # fmt: skip


def steps(*waited: float) -> list[StepRecord]:
    """Steps of two seconds, of which so many were waited."""
    return [
        StepRecord(number, 0.0, 1.0, 1.0, 1.0, 1, 2.0, None, None, communication_seconds=seconds)
        for number, seconds in enumerate(waited, 1)
    ]


BUSY = steps(*[1.0] * 5)  # half of each is waited; half of that would go
AFTER = plan_of(1)


def decided(
    records: list[StepRecord] = BUSY,
    plan: Plan | None = None,
    step: int = 10,
    opening_seconds: float = 20.0,
    **keys: Any,
) -> PlanChange | None:
    """In a run of 100 steps."""
    adapting = Adapting(Job(**(KEYS | keys)), plan or plan_of(3, AFTER), 100, opening_seconds)
    return adapting.change(records, step)


def test_it_changes_where_ranks_wait_too_long_and_it_pays_off() -> None:
    change = decided()
    assert change is not None
    assert (change.step, change.share, change.seconds) == (10, 0.5, 2.0)
    assert change.predicted_seconds == 1.5
    assert change.plan is AFTER
    assert str(change) == (
        "the plan changes after step 10: zero_stage: 1 instead of 3, as ranks wait for each other "
        "50% of a step; predicted: 1.5 s per step instead of 2.0 s"
    )


@pytest.mark.parametrize(
    ("why", "keys"),
    [
        ("nobody asked for it", {"adapt": False}),
        ("too few steps with this plan", {"records": BUSY[:4]}),
        ("they wait little enough", {"records": steps(*[0.6] * 5)}),
        ("the median does", {"records": steps(2.0, 2.0, 0.1, 0.1, 0.1)}),
        ("they did at first", {"records": [*BUSY, *steps(*[0.1] * 5)]}),
        ("nothing sends less", {"plan": plan_of(3)}),
        ("a given key would change", {"plan": plan_of(3, AFTER, ("zero_stage",))}),
        ("too few steps are left", {"step": 60}),
        ("opening takes too long", {"opening_seconds": 45.0}),
        ("it was the last step", {"step": 100, "opening_seconds": 0.0}),
        (
            "it costs more beside",
            {"plan": plan_of(3, replace(AFTER, step_time=StepTime(1.6, 0, 0, 0, 0)))},
        ),
    ],
)
def test_it_does_not_where(why: str, keys: dict[str, Any]) -> None:
    assert decided(**keys) is None, why


def test_after_a_failure_it_changes_no_more() -> None:
    change = decided()
    assert change is not None
    failed = replace(change, failure="out of memory")
    assert failed.plan == replace(change.before, lighter=None)


@pytest.mark.parametrize(
    ("save_steps", "total", "refused"),
    [(5, 10, False), (4, 9, False), (4, 8, True), (500, 100, True), (1, 5, True), (1, 6, False)],
)
def test_a_run_without_a_checkpoint_to_change_at_is_refused(
    save_steps: int, total: int, refused: bool
) -> None:
    schedule = Schedule(1000, total)
    job = Job(**KEYS, save_steps=save_steps)
    with pytest.raises(ConfigError, match="adapt changes") if refused else nullcontext():
        check_boundaries(job, schedule)
    check_boundaries(job.model_copy(update={"adapt": False}), schedule)
    check_boundaries(job.model_copy(update={"num_gpus": 1}), schedule)


def test_what_was_tried_in_vain_is_not_tried_again(tmp_path: Path) -> None:
    plan, path = plan_of(3, AFTER), tmp_path / TRIED
    assert _without_tried(plan, path) is plan
    write_plan(plan_of(2), path)
    assert _without_tried(plan, path) is plan
    write_plan(AFTER, path)
    found = _without_tried(plan, path)
    assert found.lighter is None
    assert str(path) in found.notes[-1]


def test_a_plan_is_the_runs_own_when_a_step_is_done_with_it(tmp_path: Path) -> None:
    change = decided()
    assert change is not None
    write_plan(change.before, tmp_path / PLAN)
    trial = Trial(tmp_path)
    trial.step(BUSY[0])
    trial.changed(change)
    assert read_policies(tmp_path / PLAN, OptimizerPolicy()).sharding.zero_stage == 3
    assert read_policies(tmp_path / TRIED, OptimizerPolicy()).sharding.zero_stage == 1
    trial.step(BUSY[0])
    trial.step(BUSY[1])
    assert read_policies(tmp_path / PLAN, OptimizerPolicy()).sharding.zero_stage == 1
    assert [path.name for path in tmp_path.iterdir()] == [PLAN]
