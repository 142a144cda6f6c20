"""What the engine cannot do yet, priced from what it can and from closed forms.

The dry run of the nearest policies that the engine can apply is taken, and the model states of the
two are exchanged by their closed forms. Every bill that needs this says so, and for what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from tightfit.bill.model_states import StateBytes, state_widths, tensor_state_bytes
from tightfit.bill.optimizers import FP32_BYTES
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind, Kinds, MemoryTable, Phase
from tightfit.dry_run.config import build_model
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.quantisation import linear_layers
from tightfit.engine.supported import engine_lacks
from tightfit.ledger import Section
from tightfit.policies import (
    OptimizerName,
    Policies,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)
from tightfit.units import MIB

# There from init to the end of a run; what comes and goes is counted by the dry run.
_STATES = (Kind.PARAMETERS, Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES)
_COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.EVAL)
# Enough for readers, writers and the update to be busy at once, each at a disk's full rate.
DISK_BUFFERS = 6
DISK_BUFFER_BYTES = 32 * MIB
Tiers = Mapping[Tier, Kinds]
Sections = dict[Section, dict[Tier, dict[Kind, int]]]


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
    placement, sharding, batch = wanted.placement, wanted.sharding, wanted.batch
    optimizer = wanted.optimizer
    if optimizer.name is OptimizerName.ADAFACTOR:
        optimizer = replace(optimizer, name=OptimizerName.ADAMW)
    if placement.parameters is Tier.NVME:
        placement = replace(placement, parameters=Tier.HOST)
    stage = sharding.zero_stage
    if sharding.pipeline_parallel > 1:
        # A pipeline keeps whole parameters and gradients to the end of the step, as stage 1 does
        # when it adds micro-batches up.
        stage = min(stage, 1)
        batch = replace(batch, accumulation_steps=max(2, batch.accumulation_steps))
    return Nearest(
        replace(
            wanted,
            batch=batch,
            optimizer=optimizer,
            placement=placement,
            quantisation=wanted.quantisation and QuantisationPolicy(),
            sharding=ShardingPolicy(sharding.data_parallel, stage),
        ),
        notes,
    )


def exchange_states(
    table: MemoryTable,
    run: Policies,
    wanted: Policies,
    stage: ModelTensors,
    whole: ModelTensors,
    *,
    card: bool,
) -> MemoryTable:
    """The table of `run` with the model states of `wanted`.

    Args:
        stage: what the dry run has built.
        whole: all layers, as wide as a tensor-parallel rank has them.
        card: whether what travels is page-locked on the host.
    """
    sharding = wanted.sharding
    ranks = sharding.data_parallel * sharding.pipeline_parallel
    local = replace(wanted, sharding=replace(sharding, ranks=ranks, tensor_parallel=1))
    before, after = tensor_state_bytes(stage, run), tensor_state_bytes(whole, local)
    states = _states(after, local, card=card)
    if _states(before, run, card=card) == states:
        return table
    exchanged = {phase: _exchanged(tiers, states, phase) for phase, tiers in table.peaks.items()}
    return _with_buffers(MemoryTable(exchanged), local, whole, after, card=card)


def _states(tiers: StateBytes, policies: Policies, *, card: bool) -> dict[Tier, dict[Kind, int]]:
    """The model states of a closed form on the tiers where a run has them.

    What travels is page-locked on the host of a card: of 16-bit parameters no masters do.
    """
    travelling = {Kind.PARAMETERS}
    if state_widths(policies).trainable == FP32_BYTES:
        travelling.add(Kind.MASTER_WEIGHTS)
    states: dict[Tier, dict[Kind, int]] = {tier: {} for tier in Tier}
    for tier, kinds in tiers.items():
        for kind in _STATES:
            locked = card and tier is Tier.HOST and kind in travelling
            if kinds.get(kind, 0):
                states[Tier.PINNED if locked else tier][kind] = kinds[kind]
    return states


def _exchanged(tiers: Tiers, states: Tiers, phase: Phase) -> dict[Tier, Kinds]:
    """Only parameters are there while they load."""
    present = (Kind.PARAMETERS,) if phase is Phase.LOAD else _STATES
    return {
        tier: {
            **{kind: count for kind, count in tiers.get(tier, {}).items() if kind not in _STATES},
            **{kind: count for kind, count in states[tier].items() if kind in present},
        }
        for tier in Tier
    }


def _with_buffers(
    table: MemoryTable, wanted: Policies, whole: ModelTensors, after: StateBytes, *, card: bool
) -> MemoryTable:
    """What exchanged states pass through: layers on the device, disk buffers, files."""
    placement, sharding = wanted.placement, wanted.sharding
    streams = placement.parameters is not Tier.DEVICE and sharding.data_parallel == 1
    on_disk = Tier.NVME in (placement.optimizer_states, placement.parameters)
    peaks = {phase: {tier: dict(k) for tier, k in t.items()} for phase, t in table.peaks.items()}
    for phase, tiers in peaks.items():
        if streams and phase in _COMPUTING:  # else the dry run has gathered them
            tiers[Tier.DEVICE][Kind.COLLECTIVES] = after[Tier.DEVICE].get(Kind.COLLECTIVES, 0)
        if on_disk and phase is not Phase.LOAD:
            tiers[Tier.PINNED][Kind.TRANSFER] = DISK_BUFFERS * DISK_BUFFER_BYTES
        if card and phase is Phase.SAVE:
            tiers[Tier.HOST][Kind.BUFFERS] = _file_bytes(wanted, whole)
    return MemoryTable(peaks)


def _file_bytes(wanted: Policies, whole: ModelTensors) -> int:
    """The model's file, whose tensors come from the card: see `program.save`."""
    sharding = wanted.sharding
    shards = sharding.data_parallel if sharding.zero_stage else 1
    trained = sum(t.count * t.sharded(shards).elements for t in whole if t.trainable)
    return trained // sharding.pipeline_parallel * state_widths(wanted).trainable


def in_flight(sections: Sections, policies: Policies) -> Sections:
    """A stage's sections with the micro-batches that a 1F1B pipeline has begun and not finished.

    The first stage has as many of them as there are stages and no logits, the last has one and the
    logits (https://arxiv.org/abs/2104.04473); the larger of the two in every section.
    """
    begun = min(policies.sharding.pipeline_parallel, policies.batch.accumulation_steps)
    return {
        section: {tier: _fuller(kinds, begun, section[0]) for tier, kinds in tiers.items()}
        for section, tiers in sections.items()
    }


def _fuller(kinds: dict[Kind, int], begun: int, phase: Phase) -> dict[Kind, int]:
    if begun == 1 or phase not in (Phase.FORWARD, Phase.BACKWARD):
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
