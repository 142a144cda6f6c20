"""A training job from its keys to its result, in three steps that a caller can show in between.

`prepare` looks at data, model and machine; `make_plan` decides; `train` loads, trains, evaluates
and saves, in one leg or, where the plan changes on the way, in several. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import set_seed

from tightfit.bill.table import MemoryTable
from tightfit.errors import ConfigError, DoesNotFitError, Interrupted, TrainingError
from tightfit.facts.job import Job
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.log import TrainerLog
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Plan
from tightfit.planner.plan_file import read_policies, write_plan
from tightfit.planner.pricing import Observe, nobody
from tightfit.planner.search import plan_job
from tightfit.training import together
from tightfit.training.adapting import Trial
from tightfit.training.leg import CannotBeginError, Leg, cut_short, enforced_bytes, let_go, run_leg
from tightfit.training.loop import Observer
from tightfit.training.output import LOG, PLAN, TRIED, open_output_dir
from tightfit.training.prepare import PreparedRun, prepare

__all__ = ["PreparedRun", "RunResult", "enforced_bytes", "make_plan", "prepare", "train"]


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    Attributes:
        plan: the one that it ended with.
        changes: of plans on the way; also those that failed.
        measured: with the last plan, of the rank whose device was fullest.
        answers: to the job's `sample_prompt`, before and after; empty without one.
        checkpoint: the last one saved, or the one resumed from where no step was left to do.
    """

    plan: Plan
    changes: list[PlanChange]
    records: list[StepRecord]
    evaluations: list[EvaluationRecord]
    measured: MemoryTable
    answers: list[str]
    checkpoint: Path | None


def make_plan(run: PreparedRun, observe: Observe = nobody) -> Plan:
    """Decide how to train; a resumed run goes on with its own plan as long as that fits and is not
    what the job's keys say now.

    Args:
        observe: told of all policies that are about to be priced.

    Raises:
        DoesNotFitError: nothing fits.
    """
    job, own_plan = run.job, run.output_dir / PLAN
    if run.resume_from is not None and job.plan is None and own_plan.is_file():
        same = job.model_copy(update={"plan": str(own_plan)})
        try:
            return _without_tried(_plan(same, run, observe), run.output_dir / TRIED)
        except (DoesNotFitError, ConfigError):
            pass  # the machine, the limit or what the job asks for is another one now
    return _plan(job, run, observe)


def _plan(job: Job, run: PreparedRun, observe: Observe) -> Plan:
    return plan_job(
        job,
        run.config,
        run.workload,
        run.hardware,
        observe=observe,
        lighter=True,
        threads=torch.get_num_threads(),  # this process is what trains, and has its share by now
    )


def _without_tried(plan: Plan, path: Path) -> Plan:
    """`plan` without the change that an earlier start of this run has tried in vain."""
    lighter = plan.lighter
    if lighter is None or not path.is_file():
        return plan
    if read_policies(path, plan.policies.optimizer) != lighter.plan.policies:
        return plan
    note = f"adapt tried {path} before, and no step was done with it; delete it to try again"
    return replace(plan, lighter=None, notes=(*plan.notes, note))


def train(run: PreparedRun, plan: Plan, observers: Sequence[Observer]) -> RunResult:
    """Train as planned and save; every rank of a run calls it. Where the job says `adapt` it may
    go on from a checkpoint with another plan.

    Raises:
        TrainingError: training could not go on.
        Interrupted: the user stopped it: after a step, when a checkpoint was saved, or at once.
        torch.OutOfMemoryError: the device's limit was crossed.
    """
    set_seed(run.job.seed)
    if together.rank() == 0:
        log = TrainerLog(run.output_dir / LOG, run.job.logging_steps)
        observers = [*observers, log, Trial(run.output_dir)]
    else:
        observers = []
    legs = [run_leg(run, plan, observers, opened=partial(_open_output_dir, run, plan))]
    changes: list[PlanChange] = []
    while legs[-1].change is not None:
        change, leg = _changed(run, legs[-1].change, legs[-1].checkpoint, observers)
        changes.append(change)
        legs.append(leg)
    last = legs[-1]
    return RunResult(
        plan=changes[-1].plan if changes else plan,
        changes=changes,
        records=[record for leg in legs for record in leg.records],
        evaluations=[record for leg in legs for record in leg.evaluations],
        measured=last.measured,
        answers=[text for leg in legs for text in leg.answers],
        checkpoint=last.checkpoint,
    )


def _open_output_dir(run: PreparedRun, plan: Plan) -> None:
    """Write to it for the first time."""
    with together.failing_together(ConfigError, TrainingError):
        if together.rank() == 0:
            open_output_dir(run.job, run.output_dir)
            write_plan(plan, run.output_dir / PLAN)


def _changed(
    run: PreparedRun, change: PlanChange, checkpoint: Path | None, observers: Sequence[Observer]
) -> tuple[PlanChange, Leg]:
    """Go on from a checkpoint with another plan, or as before where that cannot be set up."""
    run = replace(run, resume_from=checkpoint, steps_done=change.step)
    try:
        try:
            return change, _go_on(run, change, observers)
        except CannotBeginError as error:
            # The error itself holds on to what was set up.
            failed = replace(change, failure=str(error))
        return failed, _go_on(run, failed, observers)
    except CannotBeginError as error:
        raise TrainingError(
            f"the plan of before cannot be set up any more ({error}); {checkpoint} is whole, "
            "continue from there with --resume"
        ) from error
    except KeyboardInterrupt:
        raise Interrupted(cut_short(run.job, checkpoint)) from None


def _go_on(run: PreparedRun, change: PlanChange, observers: Sequence[Observer]) -> Leg:
    for observer in observers:
        observer.changed(change)
    let_go()
    return run_leg(run, change.plan, observers)
