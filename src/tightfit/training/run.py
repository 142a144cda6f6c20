"""A training job from its keys to its result, in three steps that a caller can show in between.

`prepare` looks at data, model and machine; `make_plan` decides; `train` loads, trains, evaluates
and saves. Prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase, set_seed

from tightfit.bill.table import MemoryTable
from tightfit.dry_run.config import load_config
from tightfit.engine.apply import fit
from tightfit.engine.precision import DTYPES
from tightfit.errors import ConfigError, DoesNotFitError, Interrupted, ModelNotFoundError
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.model_spec import ModelSpec, load_model_spec
from tightfit.facts.workload import Workload
from tightfit.monitor.log import TrainerLog
from tightfit.monitor.memory import MemoryWatch
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.machine import device_of, usable_hardware
from tightfit.planner.plan import Plan
from tightfit.planner.plan_file import write_plan
from tightfit.planner.pricing import Observe, nobody
from tightfit.planner.search import plan_job
from tightfit.policies import Tier
from tightfit.training import together
from tightfit.training.batches import average_padded_length
from tightfit.training.checkpoint import Progress, is_adapter, read_progress, restore
from tightfit.training.evaluation import answer, prompt_tokens
from tightfit.training.loop import Observer, Schedule, TrainingLoop, check_scheduler
from tightfit.training.model import check_weights, open_model
from tightfit.training.output import LOG, PLAN, check_output_dir, open_output_dir
from tightfit.training.samples import PreparedData, Sample, prepare_data
from tightfit.training.saved_states import seed_rank
from tightfit.training.tokenizer import load_tokenizer


@dataclass(frozen=True)
class PreparedRun:
    """Everything that is known before anything is decided."""

    job: Job
    spec: ModelSpec
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    workload: Workload
    hardware: Hardware
    output_dir: Path
    resume_from: Path | None
    steps_done: int
    total_steps: int


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    Attributes:
        measured: of the rank whose device was fullest.
        answers: to the job's `sample_prompt`, before and after; empty without one.
        checkpoint: the last one saved, or the one resumed from where no step was left to do.
    """

    records: list[StepRecord]
    evaluations: list[EvaluationRecord]
    measured: MemoryTable
    answers: list[str]
    checkpoint: Path | None


def prepare(job: Job) -> PreparedRun:
    """Check and read everything but the weights.

    Raises:
        InputError: any mistake in the job, its files or its output folder.
    """
    output_dir, resume_from = check_output_dir(job)
    _check_prompt(job)
    spec = load_model_spec(job.model_name_or_path)
    if spec.source in ("catalogue", "file", "hub"):
        raise ModelNotFoundError(
            f"{job.model_name_or_path} is known by its config only; training needs its weights: "
            "download it and give the folder, or put it into the Hub cache (HF_HOME)"
        )
    check_weights(Path(job.model_name_or_path).expanduser())
    tokenizer = load_tokenizer(job.model_name_or_path)
    data = prepare_data(job, tokenizer)
    total_steps = Schedule.of(job, len(data.train)).total_steps
    check_scheduler(job, total_steps)
    steps_done = 0
    if resume_from is not None:
        progress = read_progress(resume_from)
        progress.check(job, len(data.train))
        steps_done = progress.step
    return PreparedRun(
        job=job,
        spec=spec,
        config=load_config(spec.config),
        tokenizer=tokenizer,
        data=data,
        workload=workload_of(job, data, tokenizer),
        hardware=usable_hardware(output_dir),
        output_dir=output_dir,
        resume_from=resume_from,
        steps_done=steps_done,
        total_steps=total_steps,
    )


def workload_of(job: Job, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> Workload:
    """The shapes that this data will really have."""
    question = job.sample_prompt
    return Workload(
        sequence_length=_longest(data.train),
        global_batch_size=job.global_batch_size,
        evaluation_sequence_length=_longest(data.held_out),
        evaluation_batch_size=min(job.per_device_eval_batch_size, max(1, len(data.held_out))),
        prompt_length=0 if question is None else prompt_tokens(tokenizer, question).shape[1],
        max_new_tokens=job.max_new_tokens,
        average_sequence_length=average_padded_length(data.train, job.global_batch_size, job.seed),
    )


def _longest(samples: list[Sample]) -> int:
    return max((len(sample.input_ids) for sample in samples), default=0)


def _check_prompt(job: Job) -> None:
    if job.sample_prompt is not None and not job.sample_prompt.strip():
        raise ConfigError("sample_prompt is empty; write a question, or leave it out")


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
            return _plan(same, run, observe)
        except (DoesNotFitError, ConfigError):
            pass  # the machine, the limit or what the job asks for is another one now
    return _plan(job, run, observe)


def _plan(job: Job, run: PreparedRun, observe: Observe) -> Plan:
    return plan_job(job, run.config, run.workload, run.hardware, observe=observe, lighter=True)


def train(run: PreparedRun, plan: Plan, observers: list[Observer]) -> RunResult:
    """Train as planned and save; every rank of a run calls it.

    Raises:
        TrainingError: training could not go on.
        Interrupted: the user stopped it: after a step, when a checkpoint was saved, or at once.
        torch.OutOfMemoryError: the device's limit was crossed.
    """
    job = run.job
    set_seed(job.seed)
    device = device_of(run.hardware)
    answers: list[str] = []
    with MemoryWatch(device, enforced_bytes(job, plan)) as watch:
        loop = _build(run, plan, device, watch, observers)
        start = _restored(run, loop)
        # Only now, when nothing that the job names can be wrong any more.
        with together.failing_together(ConfigError):
            if together.rank() == 0:
                open_output_dir(job, run.output_dir)
                write_plan(plan, run.output_dir / PLAN)
        if start is None:
            answers += _answers(run, loop)
        try:
            loop.run(start)
        except KeyboardInterrupt:
            raise Interrupted(_cut_short(run, loop)) from None
        with watch.counting():
            answers += _answers(run, loop)
    checkpoint = loop.checkpoint or run.resume_from
    fullest = max(together.from_all(watch.table()), key=lambda t: t.peak_bytes(Tier.DEVICE))
    return RunResult(loop.records, loop.evaluations, fullest, answers, checkpoint)


def _cut_short(run: PreparedRun, loop: TrainingLoop) -> str:
    """What a second Ctrl-C leaves."""
    saved = loop.checkpoint or run.resume_from
    if saved is None:
        return "stopped at once; nothing was saved, so there is nothing to resume"
    again = "" if run.job.save_only_model else "; continue from there with --resume"
    return f"stopped at once; the last checkpoint is {saved}{again}"


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


def enforced_bytes(job: Job, plan: Plan) -> int | None:
    """The device limit that is enforced: one that was asked for, not what happens to be free."""
    return None if job.memory_limit in ("auto", "none") else plan.limits.device_bytes


def _build(
    run: PreparedRun,
    plan: Plan,
    device: torch.device,
    watch: MemoryWatch,
    observers: list[Observer],
) -> TrainingLoop:
    path = run.resume_from
    if path is None or is_adapter(path):
        path = Path(run.job.model_name_or_path).expanduser()
    model, weights = open_model(path, DTYPES[plan.policies.precision.parameters])
    engine = fit(
        model, plan.policies, device=device, offload_folder=run.job.disk_folder, values=weights
    )
    seed_rank(run.job.seed, engine.ranks.data_rank)
    if together.rank() == 0:
        observers = [*observers, TrainerLog(run.output_dir / LOG, run.job.logging_steps)]
    else:
        observers = []
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
