"""A leg of a run: its steps with one plan, from opening the model to the end or to another plan.

What it has opened is let go of when it is over, so that the next leg has all of the memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from tightfit.bill.table import MemoryTable
from tightfit.engine.apply import fit
from tightfit.engine.precision import DTYPES
from tightfit.engine.whole_modules import check_trains_ends
from tightfit.errors import Interrupted, TightfitError
from tightfit.facts.job import Job
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.memory import MemoryWatch
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.machine import device_of
from tightfit.planner.plan import Plan
from tightfit.policies import Tier
from tightfit.training import together
from tightfit.training.adapting import Adapting
from tightfit.training.checkpoint import Progress, is_adapter, read_progress, restore
from tightfit.training.evaluation import answer
from tightfit.training.loop import Observer, TrainingLoop
from tightfit.training.model import open_model
from tightfit.training.prepare import PreparedRun
from tightfit.training.saved_states import seed_rank


@dataclass(frozen=True)
class Leg:
    """What came of it.

    Attributes:
        measured: of the rank whose device was fullest.
        answers: to the job's `sample_prompt`: before all training, and after it.
        checkpoint: the last one saved, or the one that the leg has begun with.
        change: what to go on with; None where the run is over.
    """

    records: list[StepRecord]
    evaluations: list[EvaluationRecord]
    measured: MemoryTable
    answers: list[str]
    checkpoint: Path | None
    change: PlanChange | None


class CannotBeginError(Exception):
    """A plan could not be set up on every rank, and is set up on none."""


_MAY_FAIL = (torch.OutOfMemoryError, TightfitError)


def run_leg(
    run: PreparedRun,
    plan: Plan,
    observers: Sequence[Observer],
    opened: Callable[[], None] | None = None,
) -> Leg:
    """Train as planned until the run is over or another plan is to go on; all ranks call it.

    Args:
        run: says from which checkpoint.
        observers: on rank 0, the others have none.
        opened: of the first leg, called when nothing that the job names can be wrong any more. A
            later leg has None, and may fail.

    Raises:
        CannotBeginError: a later leg could not be set up; nothing of it is left.
        TrainingError: training could not go on.
        Interrupted: the user stopped it: after a step, when a checkpoint was saved, or at once.
        torch.OutOfMemoryError: the device's limit was crossed.
    """
    begun = time.perf_counter()
    answers: list[str] = []
    with MemoryWatch(device_of(run.hardware), enforced_bytes(run.job, plan)) as watch:
        may_fail = nullcontext if opened is not None else _on_all_or_none
        # Each for itself, as ranks compare what they read before they read it.
        with may_fail():
            loop = _build(run, plan, watch, observers)
        with may_fail():
            start = _restored(run, loop)
        if opened is not None:
            opened()
        adapting = Adapting(run.job, plan, run.total_steps, time.perf_counter() - begun)
        if start is None:
            answers += _answers(run, loop)
        try:
            change = loop.run(start, adapting)
        except KeyboardInterrupt:
            raise Interrupted(cut_short(run.job, loop.checkpoint or run.resume_from)) from None
        if change is None:
            with watch.counting():
                answers += _answers(run, loop)
    fullest = max(together.from_all(watch.table()), key=lambda t: t.peak_bytes(Tier.DEVICE))
    checkpoint = loop.checkpoint or run.resume_from
    return Leg(loop.records, loop.evaluations, fullest, answers, checkpoint, change)


def let_go() -> None:
    """Give back the memory of a leg that is over: engines refer to themselves in circles.

    Groups of ranks that its plan has made stay to the end of the process: torch keeps meshes, and
    hands them on to equal ones.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def enforced_bytes(job: Job, plan: Plan) -> int | None:
    """The device limit that is enforced: one that was asked for, not what happens to be free."""
    return None if job.memory_limit in ("auto", "none") else plan.limits.device_bytes


def cut_short(job: Job, checkpoint: Path | None) -> str:
    """What a second Ctrl-C leaves.

    Args:
        checkpoint: the last one.
    """
    if checkpoint is None:
        return "stopped at once; nothing was saved, so there is nothing to resume"
    again = "" if job.save_only_model else "; continue from there with --resume"
    return f"stopped at once; the last checkpoint is {checkpoint}{again}"


@contextmanager
def _on_all_or_none() -> Iterator[None]:
    """Inside, a rank may fail where no other waits for it any more: ranks meet when groups are made
    and before anything is loaded, and memory runs out where something is."""
    try:
        with together.failing_together(*_MAY_FAIL):
            yield
    except _MAY_FAIL as error:
        raise CannotBeginError(str(error)) from error


def _restored(run: PreparedRun, loop: TrainingLoop) -> Progress | None:
    """Put the checkpoint to resume from into the loop's engine; where it stood."""
    if run.resume_from is None:
        return None
    progress = read_progress(run.resume_from)
    restore(run.resume_from, loop.engine, progress)
    return progress


def _answers(run: PreparedRun, loop: TrainingLoop) -> list[str]:
    """The model's answer to the job's question, if it has one."""
    question = run.job.sample_prompt
    if question is None:
        return []
    return [answer(loop.engine, run.tokenizer, question, run.job.max_new_tokens)]


def _build(
    run: PreparedRun, plan: Plan, watch: MemoryWatch, observers: Sequence[Observer]
) -> TrainingLoop:
    path = run.resume_from
    if path is None or is_adapter(path):
        path = Path(run.job.model_name_or_path).expanduser()
    # What a job has resized its config says, and a checkpoint of it already has.
    changed = dict(run.positions)
    if run.job.resize_vocab:
        changed["vocab_size"] = run.config.get_text_config().vocab_size
    dtype = DTYPES[plan.policies.precision.parameters]
    model, weights = open_model(path, dtype, changed)
    if weights.grows:
        check_trains_ends(model, plan.policies.adapter)
    engine = fit(
        model,
        plan.policies,
        device=device_of(run.hardware),
        offload_folder=run.job.disk_folder,
        values=weights,
    )
    seed_rank(run.job.seed, engine.ranks.data_rank)
    return TrainingLoop(
        run.job,
        engine,
        run.data,
        run.tokenizer,
        plan.policies.batch.micro_batch_size,
        run.output_dir,
        watch,
        observers,
    )
