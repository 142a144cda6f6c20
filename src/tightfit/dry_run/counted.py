"""One program counted on one rank, and the line along which few layers lead to many.

What is run and on which layers is for `run.py` and `stages.py` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PretrainedConfig

from tightfit import ledger
from tightfit.bill.runtime import Capability
from tightfit.bill.table import MemoryTable, Phase
from tightfit.dry_run.allocator import CachingAllocator
from tightfit.dry_run.config import build_model
from tightfit.dry_run.depth import SHALLOW, extrapolate
from tightfit.dry_run.fakes import fake_tensors, make_fake
from tightfit.dry_run.kernels import card_kernels
from tightfit.dry_run.pinned import pinned_host
from tightfit.dry_run.program import evaluate, fill, generate, resume, save, train_step
from tightfit.dry_run.ranks import fake_ranks
from tightfit.dry_run.repeats import few_chunks
from tightfit.dry_run.runs import runs_of_layers
from tightfit.dry_run.sections import follow_layers, follow_stage
from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.engine.layers import decoder_layers
from tightfit.engine.precision import DTYPES
from tightfit.facts.workload import Workload
from tightfit.ledger import Kinds, Ledger, Section
from tightfit.policies import Policies, Tier

Sections = dict[Section, dict[Tier, Kinds]]


@dataclass(frozen=True)
class Job:
    """What is run, whatever the depth."""

    policies: Policies
    workload: Workload
    card: Capability | None


@dataclass(frozen=True)
class Counted:
    """What a ledger saw, and what torch's allocator on a card would hold beyond it.

    Attributes:
        stages: the tables of single stages of a pipeline by their numbers.
        whole: whether all layers were run.
    """

    sections: Sections
    allocator_bytes: int
    stages: Mapping[int, MemoryTable] = field(default_factory=dict)
    whole: bool = True


def along(few: Counted, more: Sequence[tuple[Counted, int]]) -> Counted:
    """From the fewest layers as many times the difference to each of others as it says."""
    sections = {
        name: {
            tier: extrapolate(tiers[tier], [(one.sections[name][tier], n) for one, n in more])
            for tier in Tier
        }
        for name, tiers in few.sections.items()
    }
    wasted = (one.allocator_bytes for one, _ in more)
    return Counted(sections, max(few.allocator_bytes, *wasted), whole=False)


def shallow(policies: Policies) -> int:
    """Layers before a run is in its steady state: where layers are gathered, the next is too; where
    they or their activations are fetched, so are as many as the plan says, and one is left."""
    placement = policies.placement
    gathered = int(policies.sharding.ranks > 1)
    fetched = Tier.DEVICE is not placement.parameters or Tier.DEVICE is not placement.activations
    return SHALLOW + gathered + (1 + placement.prefetch if fetched else 0)


def program(config: PretrainedConfig, job: Job, rank: int = 0) -> Counted:
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
        if engine.is_stage:
            follow_stage(layers, counting)
        else:
            follow_layers(layers, counting, runs_of_layers(policies.placement, len(layers)))
        train_step(engine, policies, job.workload)
        with ledger.phase(Phase.FORWARD):
            pass  # the next step begins with what this one has left
        evaluate(engine, job.workload)
        generate(engine, job.workload)
        save(engine, policies, card=card is not None)
        sections = counting.sections()
    return Counted(sections, allocator.max_reserved_bytes - _device_peak(sections))


def _device_peak(sections: Sections) -> int:
    """Of what was replayed: all but loading."""
    return max(
        sum(tiers[Tier.DEVICE].values())
        for (phase, _), tiers in sections.items()
        if phase not in (Phase.LOAD, Phase.INIT)
    )
