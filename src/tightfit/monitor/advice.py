"""What to change where ranks wait for each other too long.

Lays what was measured beside the plan and what its planner has found that sends less. Knows
records and plans; prints nothing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.lighter import changes, without_communication
from tightfit.planner.plan import Lighter, Plan
from tightfit.policies import Policies, Tier
from tightfit.units import format_bytes, format_seconds

MOST_COMMUNICATION = 0.3  # of a step, before anything is said
STEPS = 5  # whose median counts


@dataclass(frozen=True)
class Advice:
    """How long ranks wait for each other, and what would help.

    Attributes:
        share: median part of a step.
        seconds: median of a step.
        lighter: what is predicted to be faster; None where nothing is known.
        predicted_seconds: of a step with it.
    """

    share: float
    seconds: float
    lighter: Lighter | None = None
    predicted_seconds: float = 0.0


class CommunicationAdvice:
    """Says once with each plan of a run what would shorten its communication, when that takes too
    long.

    Args:
        say: is given the advice.
        adapts: whether the run follows it by itself.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None], *, adapts: bool = False) -> None:
        self._plan = plan
        self._say = say
        self._adapts = adapts
        self._last: deque[StepRecord] = deque(maxlen=STEPS)
        self._said = False

    def step(self, record: StepRecord) -> None:
        """One optimizer step is done."""
        self._last.append(record)
        if self._said or len(self._last) < STEPS:
            return
        advice = advise(self._plan, list(self._last))
        if advice is not None:
            self._said = True
            self._say(said_of(advice, self._plan, adapts=self._adapts))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Nothing to say of it."""

    def changed(self, change: PlanChange) -> None:
        """Another plan, other advice; of one that the run has come back to all was said."""
        self._plan = change.plan
        self._last.clear()
        self._said = change.failure is not None


def advise(plan: Plan, records: Sequence[StepRecord]) -> Advice | None:
    """What the steps of `records` say; None where ranks wait little enough.

    The predicted seconds are those measured, less what the change sends less, plus what it costs
    beside by the planner's step time.
    """
    share = median(record.communication_share for record in records)
    if share <= MOST_COMMUNICATION:
        return None
    seconds = median(record.seconds for record in records)
    lighter = plan.lighter
    if lighter is not None:
        waited = seconds * share
        beside = without_communication(lighter.plan.step_time)
        beside -= without_communication(plan.step_time)
        then = seconds - waited + waited * lighter.sent + beside
        if then < seconds:
            return Advice(share, seconds, lighter, then)
    return Advice(share, seconds)


def said_of(advice: Advice, plan: Plan, *, adapts: bool = False) -> str:
    """The advice in words."""
    said = f"ranks wait for each other {advice.share:.0%} of a step (median of {STEPS}). "
    lighter = advice.lighter
    if lighter is None:
        return said + _nothing_lighter(plan.policies)
    what = ", ".join(changes(plan.policies, lighter.plan.policies).values())
    said += (
        f"Predicted to help most: {what}: {format_seconds(advice.predicted_seconds)} per step "
        f"instead of {format_seconds(advice.seconds)}; it fits, device peak "
        f"{format_bytes(lighter.plan.bill.peak_bytes(Tier.DEVICE))}"
    )
    if not adapts:
        return said
    if lighter.given:
        return f"{said}. The job gives {', '.join(lighter.given)}, so adapt leaves that to you"
    return f"{said}. The run goes on with it from the next checkpoint if that pays off by its end"


def _nothing_lighter(policies: Policies) -> str:
    sharding = policies.sharding
    if sharding.tensor_parallel > 1:
        return (
            "The sums of tensor-parallel ranks lie in the way of computing; a smaller "
            "tensor_parallel_size makes fewer of them, if the model fits then"
        )
    key = (
        "per_device_train_batch_size" if sharding.zero_stage > 1 else "gradient_accumulation_steps"
    )
    return (
        "No plan is known that fits, trains the same batch and is faster. A larger "
        f"{key} sends less for each token, with a larger global batch, which trains otherwise"
    )
