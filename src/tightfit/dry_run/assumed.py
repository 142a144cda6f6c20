"""What the engine cannot do yet, priced from what it can and from closed forms.

The dry run of the nearest policies that the engine can apply is taken, and the model states of the
two are exchanged by their closed forms. Every bill that needs this says so, and for what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from tightfit.bill.model_states import tensor_state_bytes
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind, Kinds, MemoryTable, Phase
from tightfit.dry_run.config import build_model
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.quantisation import linear_layers
from tightfit.engine.supported import engine_lacks
from tightfit.policies import (
    OptimizerName,
    PlacementPolicy,
    Policies,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)
from tightfit.units import MIB

# Gradients come and go within a phase; the dry run of the nearest policies has them right.
_CONSTANT = (
    Kind.PARAMETERS,
    Kind.MASTER_WEIGHTS,
    Kind.OPTIMIZER_STATES,
    Kind.COLLECTIVES,
    Kind.TRANSFER,
)
# Enough for readers, writers and the update to be busy at once, each at a disk's full rate.
DISK_BUFFERS = 6
DISK_BUFFER_BYTES = 32 * MIB
Change = Mapping[Tier, Mapping[Kind, int]]


@dataclass(frozen=True)
class Nearest:
    """Policies that the engine can apply.

    Attributes:
        notes: what is closed form in the bill of those that were wanted; empty where they are the
            same.
    """

    policies: Policies
    notes: tuple[str, ...]


def nearest(wanted: Policies) -> Nearest:
    """The policies to run in place of `wanted`."""
    notes = tuple(f"{what}: closed form, not trained with yet" for what in engine_lacks(wanted))
    if not notes:
        return Nearest(wanted, ())
    placement, sharding = wanted.placement, wanted.sharding
    leaves = placement.optimizer_states is not Tier.DEVICE
    return Nearest(
        replace(
            wanted,
            optimizer=replace(wanted.optimizer, name=OptimizerName.ADAMW),
            placement=PlacementPolicy(placement.gradients, Tier.HOST if leaves else Tier.DEVICE),
            quantisation=wanted.quantisation and QuantisationPolicy(),
            sharding=ShardingPolicy(sharding.data_parallel, sharding.zero_stage),
        ),
        notes,
    )


def exchange_states(
    table: MemoryTable, run: Policies, wanted: Policies, stage: ModelTensors, whole: ModelTensors
) -> MemoryTable:
    """The table of `run` with the model states of `wanted`.

    Args:
        stage: what the dry run has built.
        whole: all layers, as wide as a tensor-parallel rank has them.
    """
    pipeline = wanted.sharding.pipeline_parallel
    sharding = replace(
        wanted.sharding, ranks=wanted.sharding.data_parallel * pipeline, tensor_parallel=1
    )
    change = _change(
        tensor_state_bytes(stage, run),
        tensor_state_bytes(whole, replace(wanted, sharding=sharding)),
    )
    if wanted.placement.optimizer_states is Tier.NVME:
        change[Tier.PINNED][Kind.TRANSFER] = DISK_BUFFERS * DISK_BUFFER_BYTES
    return MemoryTable(
        {
            phase: {tier: _changed(kinds.get(tier, {}), change[tier], phase) for tier in Tier}
            for phase, kinds in table.peaks.items()
        }
    )


def _change(before: Change, after: Change) -> dict[Tier, dict[Kind, int]]:
    return {
        tier: {
            kind: after.get(tier, {}).get(kind, 0) - before.get(tier, {}).get(kind, 0)
            for kind in _CONSTANT
        }
        for tier in Tier
    }


def _changed(kinds: Kinds, change: Mapping[Kind, int], phase: Phase) -> dict[Kind, int]:
    """Only parameters are there while they load."""
    present = (Kind.PARAMETERS,) if phase is Phase.LOAD else _CONSTANT
    changed = {
        kind: max(0, kinds.get(kind, 0) + (change[kind] if kind in present else 0))
        for kind in {*kinds, *present}
    }
    return {kind: count for kind, count in changed.items() if count}


def in_flight(table: MemoryTable, policies: Policies) -> MemoryTable:
    """A stage's table with the micro-batches that a 1F1B pipeline has begun and not finished.

    The first stage has as many of them as there are stages and no logits, the last has one and the
    logits (https://arxiv.org/abs/2104.04473); the larger of the two.
    """
    begun = min(policies.sharding.pipeline_parallel, policies.batch.accumulation_steps)
    return MemoryTable(
        {
            phase: {tier: _fuller(kinds, begun, phase) for tier, kinds in tiers.items()}
            for phase, tiers in table.peaks.items()
        }
    )


def _fuller(kinds: Kinds, begun: int, phase: Phase) -> Kinds:
    if phase not in (Phase.FORWARD, Phase.BACKWARD):
        return kinds
    first = dict(kinds)
    first.pop(Kind.LOGITS, None)
    first[Kind.ACTIVATIONS] = begun * kinds.get(Kind.ACTIVATIONS, 0)
    return first if sum(first.values()) > sum(kinds.values()) else kinds


def tensors_of(config: PretrainedConfig, policies: Policies) -> ModelTensors:
    """Shapes of all parameters under `policies`, adapters included."""
    if policies.adapter is not None:
        import_library()
    with torch.device("meta"):
        model = build_model(config, torch.float32)
        linears = linear_layers(model) if policies.quantisation is not None else []
        packed = {getattr(parent, name).weight for parent, name in linears}
        adapted = apply_adapter(model, policies.adapter)
    named = (
        (
            name,
            Tensor(
                tuple(parameter.shape),
                trainable=parameter.requires_grad,
                quantised=parameter in packed,
            ),
        )
        for name, parameter in adapted.named_parameters()
    )
    return ModelTensors.grouped(named, tied=bool(config.tie_word_embeddings))
