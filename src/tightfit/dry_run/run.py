"""One dry run, from a config to its result: at full depth, or at two depths and a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from tightfit import ledger
from tightfit.bill.runtime import Capability
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.bill.timetable import enough_micro_batches
from tightfit.dry_run.allocator import CachingAllocator
from tightfit.dry_run.assumed import exchange_states, nearest, tensors_of
from tightfit.dry_run.config import build_model
from tightfit.dry_run.depth import (
    SHALLOW,
    depths_of,
    extrapolate,
    fewest_layers,
    layer_signatures,
    rounds_of,
    with_depth,
)
from tightfit.dry_run.fakes import fake_tensors, make_fake
from tightfit.dry_run.kernels import card_kernels
from tightfit.dry_run.pinned import pinned_host
from tightfit.dry_run.program import evaluate, fill, generate, resume, save, train_step
from tightfit.dry_run.ranks import fake_ranks
from tightfit.dry_run.repeats import few_chunks
from tightfit.dry_run.result import DryRun, Shape
from tightfit.dry_run.runs import runs_of_layers, with_runs
from tightfit.dry_run.sections import follow_layers
from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.engine.layers import decoder_layers
from tightfit.engine.precision import DTYPES
from tightfit.engine.stages import stage_runs
from tightfit.facts.workload import Workload
from tightfit.ledger import Kinds, Ledger, Section, table_of_sections
from tightfit.policies import Policies, ShardingPolicy, Tier

_MOST_RUNS = 2
Sections = dict[Section, dict[Tier, Kinds]]


@dataclass(frozen=True)
class Job:
    """What is run, whatever the depth."""

    policies: Policies
    workload: Workload
    card: Capability | None


@dataclass(frozen=True)
class _Counted:
    """What a ledger saw, and what torch's allocator on a card would hold beyond it.

    Attributes:
        stages: the tables of single stages of a pipeline by their numbers.
    """

    sections: Sections
    allocator_bytes: int
    stages: Mapping[int, MemoryTable] = field(default_factory=dict)


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
        counted = _fullest_stages(config, job)
        layers = tuple(map(len, _stage_runs(config, wanted.sharding)))
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
    )


def _fullest_stages(config: PretrainedConfig, job: Job) -> _Counted:
    """For every section and tier the stage of a pipeline that takes most there.

    Stages are built as they are: together they have the layers of one model.
    """
    sharding = job.policies.sharding
    per_stage = sharding.ranks // sharding.pipeline_parallel
    numbers = _stages_that_may_be_fullest(config, sharding)
    by_number = {number: _program(config, job, rank=per_stage * number) for number in numbers}
    stages = by_number.values()
    names = {name: None for stage in stages for name in stage.sections}
    fullest: Sections = {
        name: {
            tier: max(
                (stage.sections.get(name, {}).get(tier, {}) for stage in stages),
                key=lambda kinds: sum(kinds.values()),
            )
            for tier in Tier
        }
        for name in names
    }
    return _Counted(
        fullest,
        max(stage.allocator_bytes for stage in stages),
        {number: table_of_sections(stage.sections) for number, stage in by_number.items()},
    )


def _stages_that_may_be_fullest(config: PretrainedConfig, sharding: ShardingPolicy) -> list[int]:
    """The first and the last, which have an end of the model, and of those between them all that no
    earlier one exceeds: it has as many micro-batches in flight at least, and where layers are
    alike more of them is more."""
    stages = sharding.pipeline_parallel
    numbers = list(range(stages))
    if len(set(layer_signatures(config))) > 1:
        return numbers
    runs = _stage_runs(config, sharding)
    layers = [[len(run) for run in runs[number::stages]] for number in numbers]
    return [
        number
        for number in numbers
        if number in (0, stages - 1)
        or not any(
            all(own <= its for own, its in zip(layers[number], layers[earlier], strict=True))
            for earlier in range(1, number)
        )
    ]


def _stage_runs(config: PretrainedConfig, sharding: ShardingPolicy) -> list[range]:
    with torch.device("meta"):
        model = build_model(config, torch.float32)
    return stage_runs(
        model, sharding.pipeline_parallel, sharding.virtual_stages, sharding.stage_layers
    )


def _counted(config: PretrainedConfig, job: Job, *, full_depth: bool) -> _Counted:
    """At full depth, or at two depths and along a line.

    What the allocator wastes depends on how blocks happen to lie and follows no line: the most of
    all depths is taken.
    """
    if full_depth:
        return _program(config, job)
    runs = runs_of_layers(job.policies.placement, config.num_hidden_layers)
    if len(runs) > 1:
        return _divided(config, job, runs)
    depths = depths_of(config, _shallow(job.policies), every=job.policies.checkpointing.every)
    if not depths.steps:
        return _program(config, job)
    few = _program(with_depth(config, depths.few), job)
    more = _program(with_depth(config, depths.more), job)
    return _along(few, [(more, depths.steps + 1)])


def _divided(config: PretrainedConfig, job: Job, runs: Sequence[int]) -> _Counted:
    """Where some layers are placed otherwise than others: along a line for each of the runs."""
    own, period = rounds_of(config, every=job.policies.checkpointing.every)
    least = _shallow(job.policies) + 1  # a run's ends differ from its middle, and from each other
    few = [fewest_layers(length, least, period) for length in runs]
    longer = [number for number, length in enumerate(runs) if length > few[number]]
    cost = (1 + len(longer)) * (sum(few) + period)
    if own or len(runs) > _MOST_RUNS or cost > sum(runs):
        return _program(config, job)

    def counted(lengths: Sequence[int]) -> _Counted:
        placement = with_runs(job.policies.placement, lengths)
        shorter = replace(job, policies=replace(job.policies, placement=placement))
        return _program(with_depth(config, sum(lengths)), shorter)

    def one_round_more(number: int) -> list[int]:
        return [length + period * (index == number) for index, length in enumerate(few)]

    steps = [
        (counted(one_round_more(number)), (runs[number] - few[number]) // period)
        for number in longer
    ]
    return _along(counted(few), steps)


def _along(few: _Counted, more: Sequence[tuple[_Counted, int]]) -> _Counted:
    """From the fewest layers as many times the difference to each of others as it says."""
    sections = {
        name: {
            tier: extrapolate(tiers[tier], [(one.sections[name][tier], n) for one, n in more])
            for tier in Tier
        }
        for name, tiers in few.sections.items()
    }
    wasted = (one.allocator_bytes for one, _ in more)
    return _Counted(sections, max(few.allocator_bytes, *wasted))


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


def _shallow(policies: Policies) -> int:
    """Layers before a run is in its steady state: where layers are gathered, the next is too; where
    they or their activations are fetched, so are as many as the plan says, and one is left."""
    placement = policies.placement
    gathered = int(policies.sharding.ranks > 1)
    fetched = Tier.DEVICE is not placement.parameters or Tier.DEVICE is not placement.activations
    return SHALLOW + gathered + (1 + placement.prefetch if fetched else 0)


def _program(config: PretrainedConfig, job: Job, rank: int = 0) -> _Counted:
    """Everything a training run does on one rank, once, on fake tensors."""
    policies, card = job.policies, job.card
    if policies.adapter is not None:
        import_library()
    with torch.device("meta"):
        model = build_model(config, DTYPES[policies.precision.parameters])
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(policies.sharding.ranks, rank))
        fakes = stack.enter_context(fake_tensors())
        stack.enter_context(few_chunks())
        make_fake(model)
        layers = decoder_layers(model)
        counting = stack.enter_context(Ledger())
        counting.shortcut = fakes.shortcut
        if card is not None:
            stack.enter_context(card_kernels(card))
            stack.enter_context(pinned_host())
        engine = fit(model, policies, offload_folder=Path(), values=fill)  # no file is made
        allocator = CachingAllocator(expandable_segments=True)
        if card is not None:
            counting.replay_device(allocator.resize)
        resume(engine)
        if not engine.is_stage:
            follow_layers(layers, counting, runs_of_layers(policies.placement, len(layers)))
        train_step(engine, policies, job.workload)
        with ledger.phase(Phase.FORWARD):
            pass  # the next step begins with what this one has left
        evaluate(engine, job.workload)
        generate(engine, job.workload)
        save(engine, policies, card=card is not None)
        sections = counting.sections()
    return _Counted(sections, allocator.max_reserved_bytes - _device_peak(sections))


def _device_peak(sections: Sections) -> int:
    """Of what was replayed: all but loading."""
    return max(
        sum(tiers[Tier.DEVICE].values())
        for (phase, _), tiers in sections.items()
        if phase not in (Phase.LOAD, Phase.INIT)
    )
