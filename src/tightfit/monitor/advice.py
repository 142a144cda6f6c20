"""What to change where ranks wait for each other too long.

Lays what was measured beside the plan and what its planner has found that sends less. Knows
records and plans; prints nothing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Lighter, Plan
from tightfit.policies import Policies, Tier
from tightfit.units import format_bytes, format_seconds

MOST_COMMUNICATION = 0.3  # of a step, before anything is said
STEPS = 5  # whose median counts


class CommunicationAdvice:
    """Says once in a run what would shorten its communication, when that takes too long.

    Args:
        say: is given the advice.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._last: deque[StepRecord] = deque(maxlen=STEPS)
        self._said = False

    def step(self, record: StepRecord) -> None:
        """One optimizer step is done."""
        self._last.append(record)
        if self._said or len(self._last) < STEPS:
            return
        said = communication_advice(self._plan, list(self._last))
        if said is not None:
            self._said = True
            self._say(said)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Nothing to say of it."""


def communication_advice(plan: Plan, records: Sequence[StepRecord]) -> str | None:
    """What to change, for the steps of `records`; None where they wait little enough.

    The predicted seconds are those measured, less what the change sends less, plus what it costs
    beside by the planner's step time.
    """
    share = median(record.communication_share for record in records)
    if share <= MOST_COMMUNICATION:
        return None
    seconds = median(record.seconds for record in records)
    said = f"ranks wait for each other {share:.0%} of a step (median of {len(records)}). "
    lighter = plan.lighter
    if lighter is None:
        return said + _nothing_lighter(plan.policies)
    then = lighter_seconds(plan, lighter, seconds, share)
    if then >= seconds:
        return said + _nothing_lighter(plan.policies)
    return said + (
        f"Predicted to help most: {', '.join(changes(plan.policies, lighter.policies))}: "
        f"{format_seconds(then)} per step instead of {format_seconds(seconds)}; it fits, device "
        f"peak {format_bytes(lighter.bill.peak_bytes(Tier.DEVICE))}"
    )


def lighter_seconds(plan: Plan, lighter: Lighter, seconds: float, share: float) -> float:
    """Predicted seconds of a step after the change, from those of one before it.

    Args:
        share: of them that ranks wait for each other.
    """
    waited = seconds * share
    beside = _without_communication(lighter) - _without_communication(plan)
    return seconds - waited + waited * lighter.sent + beside


def changes(before: Policies, after: Policies) -> Iterator[str]:
    """What is another in `after`, in the words of the job's keys."""
    old, new = before.sharding, after.sharding
    if old.zero_stage != new.zero_stage:
        yield f"zero_stage: {new.zero_stage} instead of {old.zero_stage}"
    if old.replicas != new.replicas:
        yield f"data_parallel_replicas: {new.replicas}, one on each machine"
    if before.batch != after.batch:
        micro, was = after.batch.micro_batch_size, before.batch.micro_batch_size
        yield f"per_device_train_batch_size: {micro} instead of {was}, the same global batch"


def _without_communication(what: Plan | Lighter) -> float:
    return what.step_time.total - what.step_time.communication


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
