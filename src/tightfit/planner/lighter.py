"""The plan nearest to a chosen one that sends less between ranks and fits too.

For the monitor, which may find that ranks wait for each other longer than was predicted: nobody
measures their link before a run. It looks at lower ZeRO stages, at fewer and larger micro-batches,
at half as many tensor-parallel ranks, and with several machines at one replica on each; the global
batch stays. Where such a change alone does not fit, checkpointing or a loss that takes less may
make it fit, where the job leaves them open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tightfit.facts.job import Job
from tightfit.planner.collectives import bytes_between_machines, sent_bytes
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.options import Options
from tightfit.planner.plan import Plan, StepTime
from tightfit.planner.words import checkpointing_word
from tightfit.policies import BatchPolicy, LossKind, Policies

_MOST_TRIES = 3  # of those that could fit; each costs dry runs
_WORTH_IT = 0.95  # of the bytes; above, it is the closed forms that differ


@dataclass(frozen=True)
class Found:
    """What sends less.

    Attributes:
        sent: what it sends, as a part of what was sent before.
        given: keys of the job that say otherwise.
    """

    policies: Policies
    sent: float
    given: tuple[str, ...]


@dataclass(frozen=True)
class LighterSearch:
    """Looks for what sends less.

    Attributes:
        job: whose keys are left as they are where it adapts, as far as something else helps.
        fitting: its list of what was turned down gets longer.
    """

    job: Job
    options: Options
    fitting: Fitting

    def of(self, policies: Policies) -> Found | None:
        """What sends less than `policies` and fits; None where nothing is known to.

        The first that fits, in the order of the time of a step where ranks wait now as long as they
        compute.
        """
        if policies.sharding.ranks == 1:
            return None
        most = _WORTH_IT * (now := self._sent(policies))
        found = [
            Found(candidate, self._sent(candidate) / now, given_keys(self.job, policies, candidate))
            for candidate in self._candidates(policies)
            if possible(candidate) and self._sent(candidate) < most
        ]
        could = [each for each in found if self.fitting.could_fit(each.policies)]
        if self.job.adapt:
            open_ones = [each for each in could if not each.given]
            could = [each for each in could if each.given]
            first = self._first(open_ones, policies)
            if first is not None:
                return first
        return self._first(could, policies)

    def _first(self, group: list[Found], policies: Policies) -> Found | None:
        pricing = self.fitting.pricing
        waits = without_communication(pricing.step_time(policies))

        def seconds(found: Found) -> float:
            return waits * found.sent + without_communication(pricing.step_time(found.policies))

        nearest = sorted(group, key=seconds)[:_MOST_TRIES]
        return next((found for found in nearest if self.fitting.fits(found.policies)), None)

    def _candidates(self, policies: Policies) -> Iterator[Policies]:
        for candidate in candidates(policies, self.job.nnodes):
            yield from _leaner(candidate, self.options)

    def _sent(self, policies: Policies) -> float:
        """What goes over the slowest link: between machines, where there are several."""
        found = self.fitting.pricing.exchanges(policies)
        machines = self.job.nnodes
        if machines > 1:
            return bytes_between_machines(found, policies, machines)
        return sent_bytes(found)


def candidates(policies: Policies, machines: int) -> Iterator[Policies]:
    """Other ways to train the same global batch on the same ranks, which may send less."""
    sharding, batch = policies.sharding, policies.batch
    for stage in range(0 if sharding.replicas == 1 else 1, sharding.zero_stage):
        yield replace(policies, sharding=replace(sharding, zero_stage=stage))
    steps = batch.accumulation_steps
    if sharding.pipeline_parallel == 1:  # where fewer micro-batches leave stages idle
        for times in (n for n in range(2, steps + 1) if steps % n == 0):
            larger = BatchPolicy(batch.micro_batch_size * times, steps // times)
            yield replace(policies, batch=larger)
    alone = machines % sharding.pipeline_parallel == 0 and sharding.replicas == 1
    replicas = machines // sharding.pipeline_parallel
    if alone and replicas > 1 and sharding.zero_stage == 3 and sharding.data_parallel > replicas:
        yield replace(policies, sharding=replace(sharding, replicas=replicas))
    yield from _half_as_many_tensor_ranks(policies)


def _half_as_many_tensor_ranks(policies: Policies) -> Iterator[Policies]:
    """Twice as many ranks that see other sequences; what they then have more of, they may share."""
    sharding, batch = policies.sharding, policies.batch
    micro, steps = batch.micro_batch_size, batch.accumulation_steps
    if sharding.tensor_parallel % 2 or batch.sequences_per_rank % 2:
        return
    half = BatchPolicy(micro, steps // 2) if steps % 2 == 0 else BatchPolicy(micro // 2, steps)
    tensor = sharding.tensor_parallel // 2
    for stage in dict.fromkeys((sharding.zero_stage, 3)):
        shared = replace(sharding, tensor_parallel=tensor, zero_stage=stage)
        yield replace(policies, sharding=shared, batch=half)


def _leaner(policies: Policies, options: Options) -> Iterator[Policies]:
    """`policies`, and with what is open of checkpointing and of losses that take less memory."""
    losses, checkpointing = [policies.loss], [policies.checkpointing]
    if policies.loss.kind is LossKind.FULL:
        losses += [loss for loss in options.losses if loss.kind is not LossKind.FULL]
    if not policies.checkpointing.enabled:
        checkpointing += [choice for choice in options.checkpointing if choice.enabled]
    for loss, choice in product(losses, checkpointing):
        yield replace(policies, loss=loss, checkpointing=choice)


def changes(before: Policies, after: Policies) -> dict[str, str]:
    """What is another in `after`: the job's keys, each with how one says it."""
    old, new = before.sharding, after.sharding
    found = {}
    if old.zero_stage != new.zero_stage:
        found["zero_stage"] = f"zero_stage: {new.zero_stage} instead of {old.zero_stage}"
    if old.replicas != new.replicas:
        found["data_parallel_replicas"] = (
            f"data_parallel_replicas: {new.replicas}, one on each machine"
        )
    if old.tensor_parallel != new.tensor_parallel:
        found["tensor_parallel_size"] = (
            f"tensor_parallel_size: {new.tensor_parallel} instead of {old.tensor_parallel}"
        )
    if before.batch != after.batch and old.data_parallel == new.data_parallel:
        micro, was = after.batch.micro_batch_size, before.batch.micro_batch_size
        found["per_device_train_batch_size"] = (
            f"per_device_train_batch_size: {micro} instead of {was}, the same global batch"
        )
    if before.loss.kind is not after.loss.kind:
        found["loss"] = f"loss: {after.loss.kind}"
    if before.checkpointing != after.checkpointing:
        found["gradient_checkpointing"] = f"gradient_checkpointing: {checkpointing_word(after)}"
    return found


def given_keys(job: Job, before: Policies, after: Policies) -> tuple[str, ...]:
    """Keys that the job gives and that `after` changes."""
    return tuple(key for key in changes(before, after) if is_given(job, key))


def is_given(job: Job, key: str) -> bool:
    """Whether the job says what `key` is, so that it is not the planner's to change. The sizes of a
    batch are one choice: who gives one has given the other."""
    if key == "per_device_train_batch_size":
        return (job.per_device_train_batch_size, job.gradient_accumulation_steps) != (
            "auto",
            "auto",
        )
    return key in job.model_fields_set and getattr(job, key) != "auto"


def adapt_notes(job: Job, plan: Plan) -> Iterator[str]:
    """Why `adapt` will change nothing in this run; nothing where it may."""
    lighter = plan.lighter
    if job.ranks == 1:
        return  # which every plan says (`explain.without_effect`)
    if lighter is None:
        yield "adapt: true has no effect, as no plan is known that sends less and fits"
    elif lighter.given:
        keys = ", ".join(lighter.given)
        yield (
            f"adapt: true has no effect, as what would help changes {keys}, which the job gives; "
            "say auto, or leave it out"
        )


def without_communication(time: StepTime) -> float:
    """Predicted seconds of a step where ranks need not wait."""
    return time.total - time.communication
