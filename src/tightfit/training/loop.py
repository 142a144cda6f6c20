"""The training loop: global batches through the engine, evaluation and checkpoints in between.

The loss of a step is the mean over the trained tokens of its global batch, however it is split
into micro-batches and among ranks, all of which run this loop. Knows the engine's face, not what a
plan made of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedTokenizerBase, get_scheduler

from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError, Interrupted, TrainingError
from tightfit.facts.job import Job
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.communication import CommunicationWatch
from tightfit.monitor.memory import MemoryWatch
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.training import together
from tightfit.training.batches import global_batches, rounds, trained_tokens
from tightfit.training.checkpoint import Progress, prune_checkpoints, save_checkpoint
from tightfit.training.evaluation import MicroBatches, evaluate
from tightfit.training.interrupt import InterruptFlag
from tightfit.training.samples import PreparedData, Sample

_MAX_BAD_STEPS = 5  # in a row; each leaves the model as it was


class Observer(Protocol):
    """Whoever wants to see records as they come."""

    def step(self, record: StepRecord) -> None:
        """One optimizer step is done."""
        ...

    def evaluation(self, record: EvaluationRecord) -> None:
        """One evaluation is done."""
        ...

    def changed(self, change: PlanChange) -> None:
        """The run goes on from a checkpoint with another plan, or cannot."""
        ...


class ChangeOfPlan(Protocol):
    """Whoever may want a run to go on with another plan."""

    def change(self, records: Sequence[StepRecord], step: int) -> PlanChange | None:
        """What to change now that a checkpoint of `step` is saved; the same on every rank.

        Args:
            records: of the steps so far.
        """
        ...


@dataclass(frozen=True)
class Schedule:
    """How many steps a run has.

    Attributes:
        steps_per_epoch: the last may have fewer sequences.
        total_steps: of the whole run.
    """

    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, job: Job, train_samples: int) -> Schedule:
        """Steps of `job` over so many samples; `max_steps` wins over `num_train_epochs`."""
        per_epoch = math.ceil(train_samples / job.global_batch_size)
        epochs = math.ceil(job.num_train_epochs * per_epoch)
        return cls(per_epoch, job.max_steps if job.max_steps > 0 else epochs)

    def evaluations_due(self, job: Job, step: int) -> bool:
        """Whether to evaluate after `step`; the last step is evaluated anyway."""
        return step != self.total_steps and self._due(job.eval_strategy, job.eval_steps, step)

    def save_due(self, job: Job, step: int) -> bool:
        """Whether to save after `step`; after the last one always."""
        return step == self.total_steps or self._due(job.save_strategy, job.save_steps, step)

    def _due(self, strategy: str, every: int, step: int) -> bool:
        interval = {"no": 0, "steps": every, "epoch": self.steps_per_epoch}[strategy]
        return interval > 0 and step % interval == 0


class TrainingLoop:
    """Runs a job's steps.

    Attributes:
        records: one for each step done here.
        evaluations: one for each evaluation done here.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        data: PreparedData,
        tokenizer: PreTrainedTokenizerBase,
        micro_batch_size: int,
        output_dir: Path,
        watch: MemoryWatch,
        observers: Sequence[Observer],
    ) -> None:
        self._job = job
        self.engine = engine
        self._data = data
        self._tokenizer = tokenizer
        self._micro_batch_size = micro_batch_size
        self._output_dir = output_dir
        self._watch = watch
        self._communication = CommunicationWatch(engine.device)
        self._observers = observers
        self.schedule = Schedule.of(job, len(data.train))
        self._scheduler = _scheduler(job, engine.optimizer, self.schedule.total_steps)
        self._bad_steps = 0
        self.records: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.checkpoint: Path | None = None

    def run(
        self, start: Progress | None = None, adapting: ChangeOfPlan | None = None
    ) -> PlanChange | None:
        """Train from `start` to the end, or to a checkpoint from which another plan goes on.

        Returns:
            What to change, where the run is not over.

        Raises:
            TrainingError: too many steps in a row whose gradients are not finite.
            Interrupted: the user stopped it; a checkpoint was saved.
        """
        if start is not None:
            _fast_forward(self._scheduler, start.step)
        else:
            self.evaluate(step=0)
        with InterruptFlag() as interrupt:
            for progress, samples in self._steps(start):
                self._one_step(progress, samples)
                stop = together.any_of(interrupt.raised)
                if self.schedule.evaluations_due(self._job, progress.step):
                    self.evaluate(progress.step)
                save = stop or self.schedule.save_due(self._job, progress.step)
                if save:
                    self._save(progress)
                if stop:
                    raise Interrupted(self._stopped(progress.step))
                if save and adapting is not None:
                    change = adapting.change(self.records, progress.step)
                    if change is not None:
                        return change
                self._watch.step_done(len(self.records))
        self.evaluate(self.schedule.total_steps)
        return None

    def evaluate(self, step: int) -> None:
        """Measure the held-out loss, if anything is held out."""
        if self._data.held_out:
            with self._watch.counting(unless=bool(self.evaluations)):
                record = evaluate(
                    self.engine,
                    self._data.held_out,
                    self._job.per_device_eval_batch_size,
                    self._pad_token_id,
                    step,
                )
            self.evaluations.append(record)
            for observer in self._observers:
                observer.evaluation(record)

    @property
    def _pad_token_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        assert isinstance(pad, int)
        return pad

    def _steps(self, start: Progress | None) -> Iterator[tuple[Progress, list[Sample]]]:
        """The global batches that are left, each with the progress that it makes."""
        step = start.step if start else 0
        epoch = start.epoch if start else 0
        skip = start.steps_in_epoch if start else 0
        while step < self.schedule.total_steps:
            batches = global_batches(
                self._data.train, self._job.global_batch_size, self._job.seed, epoch
            )
            for index, samples in enumerate(batches):
                if index < skip:
                    continue
                if step == self.schedule.total_steps:
                    return
                step += 1
                yield self._progress(step, epoch, index + 1), samples
            epoch, skip = epoch + 1, 0

    def _progress(self, step: int, epoch: int, steps_in_epoch: int) -> Progress:
        return Progress(
            step=step,
            epoch=epoch,
            steps_in_epoch=steps_in_epoch,
            global_batch_size=self._job.global_batch_size,
            train_samples=len(self._data.train),
            seed=self._job.seed,
        )

    def _one_step(self, progress: Progress, samples: list[Sample]) -> None:
        begin = time.perf_counter()
        learning_rate = float(self._scheduler.get_last_lr()[0])
        scale = self.engine.loss_scale
        scaled_by = None if scale is None else scale.value
        with self._communication.counting():
            loss, tokens = self._forward_backward(samples)
            norm = self.engine.step()
        self._scheduler.step()
        record = StepRecord(
            step=progress.step,
            epoch=progress.epoch + progress.steps_in_epoch / self.schedule.steps_per_epoch,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=norm,
            tokens=tokens,
            seconds=time.perf_counter() - begin,
            device_bytes=self._watch.device_bytes(),
            device_peak_bytes=self._watch.device_peak_bytes(),
            skipped=not math.isfinite(norm),
            nvme_written_bytes=self.engine.written_bytes,
            communication_seconds=self._communication.take_seconds(),
            loss_scale=scaled_by,
        )
        self.records.append(record)
        for observer in self._observers:
            observer.step(record)
        self._count_bad(record)

    def _forward_backward(self, samples: list[Sample]) -> tuple[float, int]:
        """Loss per trained token of the global batch, and the tokens that all ranks processed."""
        ranks = self.engine.ranks
        groups = rounds(samples, self._micro_batch_size, ranks.data_rank, ranks.data_ranks)
        batches = MicroBatches(groups, self._pad_token_id, self.engine.device)
        loss = self.engine.forward_backward(batches, trained_tokens(samples))
        loss_of_all, tokens_of_all = ranks.total([loss, batches.tokens])
        return loss_of_all, int(tokens_of_all)

    def _count_bad(self, record: StepRecord) -> None:
        scale = self.engine.loss_scale
        if record.skipped and scale is not None and not scale.is_lowest:
            return  # the next one has a lower scale
        self._bad_steps = self._bad_steps + 1 if record.skipped else 0
        if self._bad_steps == _MAX_BAD_STEPS:
            raise TrainingError(
                f"the gradients of {_MAX_BAD_STEPS} steps in a row were not finite (last: step "
                f"{record.step}, loss {record.loss}); lower learning_rate or look at the data"
            )

    def _save(self, progress: Progress) -> None:
        if self.engine.loss_scale is not None:
            progress = replace(progress, loss_scale=self.engine.loss_scale.state())
        with self._watch.counting(unless=self.checkpoint is not None):
            self.checkpoint = save_checkpoint(
                self._output_dir,
                self.engine,
                self._tokenizer,
                progress,
                with_optimizer=not self._job.save_only_model,
            )
        if together.rank() == 0:
            prune_checkpoints(self._output_dir, self._job.save_total_limit)

    def _stopped(self, step: int) -> str:
        if self._job.save_only_model:
            return (
                f"stopped after step {step}; the model is saved as {self.checkpoint}, without the "
                "optimizer (save_only_model), so the run cannot be resumed"
            )
        return f"stopped after step {step}; continue with --resume (saved as {self.checkpoint})"


def check_scheduler(job: Job, total_steps: int) -> None:
    """See that the job's schedule can be made, on an optimizer of nothing.

    Raises:
        ConfigError: there is none of that name, or it needs settings that a job has not.
    """
    nothing = torch.optim.SGD([torch.zeros(1)], lr=job.learning_rate)
    scheduler = _scheduler(job, nothing, total_steps)
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(
            f"lr_scheduler_type: {job.lr_scheduler_type} cannot be used, as it follows more than "
            "the step; use linear, cosine or constant_with_warmup"
        )


def _scheduler(job: Job, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """A schedule of transformers.

    Raises:
        ConfigError: there is none of that name, or it needs settings that a job has not.
    """
    warmup = job.warmup_steps
    steps = math.ceil(warmup * total_steps) if warmup < 1 else int(warmup)
    try:
        scheduler: LRScheduler = get_scheduler(
            job.lr_scheduler_type,
            optimizer,
            num_warmup_steps=steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(job.lr_scheduler_kwargs),
        )
    except (ValueError, TypeError) as error:
        own = f" (lr_scheduler_kwargs: {job.lr_scheduler_kwargs})" * bool(job.lr_scheduler_kwargs)
        raise ConfigError(f"lr_scheduler_type: {job.lr_scheduler_type}{own}: {error}") from None
    return scheduler


def _fast_forward(scheduler: LRScheduler, step: int) -> None:
    """Go on after `step` with the rates that the job's schedule, as long as it is now, has there.

    A schedule is a function of the step, so nothing else has to be saved, and a run that is made
    longer goes on where the longer schedule would be.
    """
    assert isinstance(scheduler, LambdaLR)
    scheduler.last_epoch = step
    rates = [
        base * factor(step)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
