"""When a run changes its plan, and the file of the plan that it tries.

Asked where a checkpoint was saved, as the other plan goes on from there. It changes where the last
steps waited too long for other ranks, something is known that sends less and leaves the job's keys
as they are, and what it is predicted to gain by the end of the run is more than opening the model
takes. Each plan sends less than the one before, so that none comes twice. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.errors import ConfigError
from tightfit.facts.disk import writing
from tightfit.facts.job import Job
from tightfit.monitor.advice import STEPS, advise
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Plan
from tightfit.planner.plan_file import write_plan
from tightfit.training import together
from tightfit.training.loop import Schedule
from tightfit.training.output import PLAN, TRIED


def check_boundaries(job: Job, schedule: Schedule) -> None:
    """See that a run that is to adapt saves where it could.

    Raises:
        ConfigError: it saves before it knows how long ranks wait, or after the last step alone.
    """
    total = schedule.total_steps
    if not job.adapt or job.ranks == 1:
        return
    if not any(schedule.save_due(job, step) for step in range(STEPS, total)):
        raise ConfigError(
            f"adapt changes the plan when a checkpoint is saved, after step {STEPS} at the "
            f"earliest, and none is saved from there to the last of {total} steps: lower "
            "save_steps, or leave adapt out"
        )


@dataclass(frozen=True)
class Adapting:
    """Whether a run is to go on with another plan.

    Attributes:
        plan: that it has.
        opening_seconds: that opening the model with it took.
    """

    job: Job
    plan: Plan
    total_steps: int
    opening_seconds: float

    def change(self, records: Sequence[StepRecord], step: int) -> PlanChange | None:
        """What to change now that a checkpoint of `step` is saved; the same on every rank, all of
        which must ask.

        Args:
            records: of this plan's steps. Those of rank 0 count.
        """
        lighter = self.plan.lighter
        if not self.job.adapt or lighter is None or lighter.given:
            return None
        own = self._change(records, step) if together.rank() == 0 else None
        return together.from_all(own)[0]

    def _change(self, records: Sequence[StepRecord], step: int) -> PlanChange | None:
        advice = advise(self.plan, records[-STEPS:]) if len(records) >= STEPS else None
        if advice is None or advice.lighter is None:
            return None
        gain = (advice.seconds - advice.predicted_seconds) * (self.total_steps - step)
        if gain <= self.opening_seconds:
            return None
        return PlanChange(
            step=step,
            before=self.plan,
            after=advice.lighter.plan,
            share=advice.share,
            seconds=advice.seconds,
            predicted_seconds=advice.predicted_seconds,
        )


class Trial:
    """Writes down which plan a run tries, and makes it the run's own when a step with it is done.

    So a run that starts again after the other plan has ended it goes on with its own.

    Raises:
        TrainingError: out of its methods, where the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tries = False

    def step(self, record: StepRecord) -> None:
        """One optimizer step is done."""
        if self._tries:
            self._tries = False
            with writing(self._folder / PLAN):
                (self._folder / TRIED).replace(self._folder / PLAN)

    def evaluation(self, record: EvaluationRecord) -> None:
        """It proves nothing."""

    def changed(self, change: PlanChange) -> None:
        """Another plan is tried, or was in vain; what was in vain stays written down."""
        self._tries = change.failure is None
        if self._tries:
            whole = self._folder / f".{TRIED}"
            write_plan(change.after, whole)
            with writing(self._folder / TRIED):
                whole.replace(self._folder / TRIED)
