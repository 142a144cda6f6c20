"""One dry run, from a config to its result: at full depth, or at two depths and a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from transformers import PretrainedConfig

from tightfit.bill.runtime import Capability
from tightfit.bill.table import Kind
from tightfit.bill.timetable import enough_micro_batches
from tightfit.dry_run.assumed import exchange_states, nearest, tensors_of
from tightfit.dry_run.counted import Counted, Job, along, program, shallow
from tightfit.dry_run.depth import depths_of, fewest_layers, rounds_of, with_depth
from tightfit.dry_run.result import DryRun, Shape
from tightfit.dry_run.runs import runs_of_layers, with_runs
from tightfit.dry_run.stages import fullest_stages, layers_of_stages
from tightfit.facts.workload import Workload
from tightfit.ledger import table_of_sections
from tightfit.policies import Policies, Tier

_MOST_RUNS = 2


def run(
    config: PretrainedConfig,
    wanted: Policies,
    workload: Workload,
    *,
    full_depth: bool,
    card: Capability | None,
) -> DryRun:
    """See `dry_run`."""
    chosen = nearest(wanted)
    job = Job(_briefly(chosen.policies), workload, card)
    layers: tuple[int, ...] = ()
    if wanted.sharding.pipeline_parallel > 1:
        layers = layers_of_stages(config, wanted.sharding)
        counted = fullest_stages(config, job, layers, full_depth=full_depth)
    else:
        counted = _counted(config, job, full_depth=full_depth)
    table = table_of_sections(counted.sections)
    if chosen.notes:
        table = exchange_states(
            table,
            job.policies,
            wanted,
            tensors_of(config, wanted),
            card=card is not None,
        )
    if card is not None:
        table = table.plus(Tier.DEVICE, Kind.ALLOCATOR, counted.allocator_bytes)
    tensors = tensors_of(config, wanted)
    return DryRun(
        table,
        tensors.count(trainable=True),
        tensors.count(trainable=False),
        tensors.count(trainable=False, quantised=True),
        Shape(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.hidden_size,
            config.vocab_size,
            bool(config.tie_word_embeddings),
            rounds_of(config) == (0, 1),
        ),
        chosen.notes,
        sum(tensor.trainable for tensor in tensors),
        counted.stages,
        layers,
        counted.whole,
    )


def _counted(config: PretrainedConfig, job: Job, *, full_depth: bool) -> Counted:
    """At full depth, or at two depths and along a line.

    What the allocator wastes depends on how blocks happen to lie and follows no line: the most of
    all depths is taken.
    """
    if full_depth:
        return program(config, job)
    runs = runs_of_layers(job.policies.placement, config.num_hidden_layers)
    if len(runs) > 1:
        return _divided(config, job, runs)
    depths = depths_of(config, shallow(job.policies), every=job.policies.checkpointing.every)
    if not depths.steps:
        return program(config, job)
    few = program(with_depth(config, depths.few), job)
    more = program(with_depth(config, depths.more), job)
    return along(few, [(more, depths.steps + 1)])


def _divided(config: PretrainedConfig, job: Job, runs: Sequence[int]) -> Counted:
    """Where some layers are placed otherwise than others: along a line for each of the runs."""
    own, period = rounds_of(config, every=job.policies.checkpointing.every)
    least = shallow(job.policies) + 1  # a run's ends differ from its middle, and from each other
    few = [fewest_layers(length, least, period) for length in runs]
    longer = [number for number, length in enumerate(runs) if length > few[number]]
    cost = (1 + len(longer)) * (sum(few) + period)
    if own or len(runs) > _MOST_RUNS or cost > sum(runs):
        return program(config, job)

    def counted(lengths: Sequence[int]) -> Counted:
        placement = with_runs(job.policies.placement, lengths)
        shorter = replace(job, policies=replace(job.policies, placement=placement))
        shown = config.to_json_string(use_diff=False)
        return _of_few_layers(_Shown(shown, config), shorter, sum(lengths))

    def one_round_more(number: int) -> list[int]:
        return [length + period * (index == number) for index, length in enumerate(few)]

    steps = [
        (counted(one_round_more(number)), (runs[number] - few[number]) // period)
        for number in longer
    ]
    return along(counted(few), steps)


@dataclass(frozen=True)
class _Shown:
    """A config that is equal to another with the same content."""

    content: str
    config: PretrainedConfig = field(compare=False)


@lru_cache(maxsize=64)
def _of_few_layers(shown: _Shown, job: Job, layers: int) -> Counted:
    """The same for every fraction whose runs of layers are longer."""
    return program(with_depth(shown.config, layers), job)


def _briefly(policies: Policies) -> Policies:
    """Two micro-batches stand for any number: the second sees what accumulates. In a pipeline as
    many do as its schedule says. Updates take the same memory at once as in a thread, which no
    ledger would see."""
    steps, sharding = policies.batch.accumulation_steps, policies.sharding
    stages, schedule = sharding.pipeline_parallel, sharding.pipeline_schedule
    few = min(steps, 2) if stages == 1 else enough_micro_batches(schedule, stages, steps)
    return replace(
        policies,
        batch=replace(policies.batch, accumulation_steps=few),
        placement=replace(policies.placement, lazy_step=False),
    )
