"""The bill of a pipeline: of every section and tier the stage that takes most there.

Stages are built as their ranks build them: together they have the layers of one model. A stage of
many layers is run with few and with a round of them more, like a model without stages; the others
then have fewer layers too, so that all layers stay of the kind that they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from tightfit.dry_run.config import build_model
from tightfit.dry_run.counted import Counted, Job, Sections, along, program, shallow
from tightfit.dry_run.depth import fewest_layers, layer_signatures, rounds_of, with_depth
from tightfit.engine.stages import stage_runs
from tightfit.ledger import table_of_sections
from tightfit.policies import ShardingPolicy, Tier


def fullest_stages(
    config: PretrainedConfig, job: Job, runs: Sequence[int], *, full_depth: bool
) -> Counted:
    """For every section and tier the stage of a pipeline that takes most there.

    Args:
        runs: how many layers each run has, in the order of the model.
    """
    numbers = _stages_that_may_be_fullest(config, runs, job.policies.sharding)
    by_number = {
        number: _whole(config, job, number) if full_depth else _stage(config, job, runs, number)
        for number in numbers
    }
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
    return Counted(
        fullest,
        max(stage.allocator_bytes for stage in stages),
        {number: table_of_sections(stage.sections) for number, stage in by_number.items()},
        all(stage.whole for stage in stages),
    )


def _whole(config: PretrainedConfig, job: Job, number: int) -> Counted:
    """One stage with all of its layers."""
    sharding = job.policies.sharding
    return program(config, job, rank=number * (sharding.ranks // sharding.pipeline_parallel))


def _stage(config: PretrainedConfig, job: Job, runs: Sequence[int], number: int) -> Counted:
    """One stage, with few layers and along a line where that is less work than with all."""
    policies, stages = job.policies, job.policies.sharding.pipeline_parallel
    prefix, period = rounds_of(config, every=policies.checkpointing.every)
    least, own = shallow(policies), runs[number::stages]
    rounds = min((length - fewest_layers(length, least, period)) // period for length in own)
    few = sum(own) - rounds * period * len(own)
    parts = min(policies.placement.optimizer_fraction, policies.placement.parameter_fraction)
    if prefix or parts < 1 or 2 * few + period * len(own) >= sum(own):
        return _whole(config, job, number)

    def counted(fewer: int) -> Counted:
        layers = tuple(length - period * min(fewer, (length - 1) // period) for length in runs)
        sharding = replace(policies.sharding, stage_layers=layers)
        shorter = replace(job, policies=replace(policies, sharding=sharding))
        return _whole(with_depth(config, sum(layers)), shorter, number)

    return along(counted(rounds), [(counted(rounds - 1), rounds)])


def _stages_that_may_be_fullest(
    config: PretrainedConfig, runs: Sequence[int], sharding: ShardingPolicy
) -> list[int]:
    """The first and the last, which have an end of the model, and of those between them all that no
    earlier one exceeds: it has as many micro-batches in flight at least, and where layers are
    alike more of them is more."""
    stages = sharding.pipeline_parallel
    numbers = list(range(stages))
    if len(set(layer_signatures(config))) > 1:
        return numbers
    layers = [runs[number::stages] for number in numbers]
    return [
        number
        for number in numbers
        if number in (0, stages - 1)
        or not any(
            all(own <= its for own, its in zip(layers[number], layers[earlier], strict=True))
            for earlier in range(1, number)
        )
    ]


def layers_of_stages(config: PretrainedConfig, sharding: ShardingPolicy) -> tuple[int, ...]:
    """How many layers each run has, in the order of the model."""
    with torch.device("meta"):
        model = build_model(config, torch.float32)
    runs = stage_runs(
        model, sharding.pipeline_parallel, sharding.virtual_stages, sharding.stage_layers
    )
    return tuple(map(len, runs))
