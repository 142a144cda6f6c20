"""The plan nearest to a chosen one that sends less between ranks and fits too.

For the monitor, which may find that ranks wait for each other longer than was predicted: nobody
measures their link before a run. It looks at lower ZeRO stages, at fewer and larger micro-batches,
and with several machines at one replica on each; the global batch stays. Which of those that send
least fits first is the answer. With tensor-parallel ranks there is none, as nothing counts what
those send. Knows no rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tightfit.planner.collectives import sent_bytes
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.plan import Lighter
from tightfit.policies import BatchPolicy, Policies

_MOST_TRIES = 3  # of those that could fit; each costs dry runs


def lighter_plan(policies: Policies, fitting: Fitting, machines: int) -> Lighter | None:
    """What sends less than `policies` and fits; None where nothing is known to.

    Args:
        fitting: its list of what was turned down gets longer.
        machines: the ranks are on, as many on each.
    """
    sharding = policies.sharding
    if sharding.ranks != sharding.data_parallel or sharding.replicas > 1:
        return None
    counts = fitting.pricing.counts(policies)
    parameters = counts.trainable + counts.frozen + counts.quantised

    def sent(candidate: Policies) -> float:
        return slowest_bytes(parameters, counts.trainable, candidate)

    def cheapest(candidate: Policies) -> tuple[float, float]:
        return sent(candidate), fitting.pricing.step_time(candidate).total

    now = sent(policies)
    less = [p for p in candidates(policies, machines) if possible(p) and sent(p) < now]
    could = [p for p in sorted(less, key=cheapest) if fitting.could_fit(p)]
    found = next((p for p in could[:_MOST_TRIES] if fitting.fits(p)), None)
    if found is None:
        return None
    bill = fitting.pricing.bill(found, full_depth=True)
    return Lighter(found, bill, fitting.pricing.step_time(found), sent(found) / now)


def candidates(policies: Policies, machines: int) -> Iterator[Policies]:
    """Other ways to train the same global batch on the same ranks, which may send less."""
    sharding, batch = policies.sharding, policies.batch
    for stage in range(sharding.zero_stage):
        yield replace(policies, sharding=replace(sharding, zero_stage=stage))
    steps = batch.accumulation_steps
    for times in (n for n in range(2, steps + 1) if steps % n == 0):
        yield replace(policies, batch=BatchPolicy(batch.micro_batch_size * times, steps // times))
    if machines > 1 and sharding.zero_stage == 3 and sharding.data_parallel > machines:
        yield replace(policies, sharding=replace(sharding, replicas=machines))


def slowest_bytes(parameters: int, trainable: int, policies: Policies) -> float:
    """What one rank sends over the slowest link in a step, which is between machines if there are
    several. A ring over all ranks leads all of its bytes over each link; with a replica on each
    machine only the sums of its shards' gradients go from one to the other, in each micro-batch.
    """
    sharding = policies.sharding
    if sharding.replicas == 1:
        return sent_bytes(parameters, trainable, policies)
    shard = policies.precision.parameter_bytes * trainable / sharding.shards
    replicas = sharding.replicas
    return 2 * (replicas - 1) / replicas * shard * policies.batch.accumulation_steps
