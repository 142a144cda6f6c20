"""A run's change from one plan to another. Plain data and how one says it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightfit.planner.lighter import changes
from tightfit.planner.plan import Plan
from tightfit.planner.words import techniques
from tightfit.units import format_seconds


@dataclass(frozen=True)
class PlanChange:
    """What was decided after the checkpoint of a step.

    Attributes:
        step: optimizer steps done.
        before, after: the plan that was left, and the one that sends less.
        share: median part of a step that ranks waited for each other with the first.
        seconds: median of a step with it.
        predicted_seconds: of a step with the second.
        failure: why the second could not be set up, so that the run goes on with the first; None
            where nothing is known against it.
    """

    step: int
    before: Plan
    after: Plan
    share: float
    seconds: float
    predicted_seconds: float
    failure: str | None = None

    @property
    def plan(self) -> Plan:
        """What the run goes on with; where that is the first one, it changes no more."""
        return self.after if self.failure is None else replace(self.before, lighter=None)

    @property
    def what(self) -> str:
        """What is another, in the words of the job's keys."""
        return ", ".join(changes(self.before.policies, self.after.policies).values())

    def __str__(self) -> str:
        if self.failure is not None:
            return (
                f"the run goes on as before from the checkpoint of step {self.step}, as "
                f"{self.what} could not be set up: {self.failure}"
            )
        return (
            f"the plan changes after step {self.step}: {self.what}, as ranks wait for each other "
            f"{self.share:.0%} of a step; predicted: {format_seconds(self.predicted_seconds)} per "
            f"step instead of {format_seconds(self.seconds)}"
        )

    def to_json(self) -> dict[str, object]:
        """What docs/json.md describes."""
        return {
            "step": self.step,
            "what": self.what,
            "before": techniques(self.before.policies),
            "after": techniques(self.after.policies),
            "communication_share": self.share,
            "seconds": self.seconds,
            "predicted_seconds": self.predicted_seconds,
            "failure": self.failure,
        }
