"""What the engine cannot do yet, priced from what it can and from closed forms.

The dry run of the nearest policies that the engine can apply is taken, and the model states of the
two are exchanged by their closed forms. Every bill that needs this says so, and for what.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from transformers import PretrainedConfig

from tightfit.bill.model_states import StateBytes, state_widths, tensor_state_bytes
from tightfit.bill.optimizers import FP32_BYTES
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind, Kinds, MemoryTable, Phase
from tightfit.dry_run.config import build_model
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.quantisation import linear_layers
from tightfit.engine.supported import WHOLE_PARAMETERS, engine_lacks
from tightfit.engine.tensor_parallel import divided_dims
from tightfit.policies import (
    AdapterPolicy,
    OptimizerName,
    Policies,
    QuantisationPolicy,
    Tier,
)

# There from init to the end of a run; what comes and goes is counted by the dry run.
_STATES = (Kind.PARAMETERS, Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES)


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
    optimizer = wanted.optimizer
    if optimizer.name in WHOLE_PARAMETERS and any(engine_lacks(replace(wanted, quantisation=None))):
        optimizer = replace(optimizer, name=OptimizerName.ADAMW)
    return Nearest(
        replace(
            wanted,
            optimizer=optimizer,
            quantisation=wanted.quantisation and QuantisationPolicy(),
        ),
        notes,
    )


def exchange_states(
    table: MemoryTable,
    run: Policies,
    wanted: Policies,
    tensors: ModelTensors,
    *,
    card: bool,
) -> MemoryTable:
    """The table of `run` with the model states of `wanted`: what the closed forms differ by.

    Args:
        tensors: of the whole model.
        card: whether what travels is page-locked on the host.
    """
    before = _states(tensor_state_bytes(tensors, run), run, card=card)
    after = _states(tensor_state_bytes(tensors, wanted), wanted, card=card)
    peaks = {
        phase: {
            tier: _exchanged(tiers.get(tier, {}), before[tier], after[tier], phase) for tier in Tier
        }
        for phase, tiers in table.peaks.items()
    }
    return MemoryTable(peaks)


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


def _exchanged(counted: Kinds, before: Kinds, after: Kinds, phase: Phase) -> Kinds:
    """What was counted on a tier and more of what is more now; only parameters are there while
    they load."""
    kinds = dict(counted)
    for kind in (Kind.PARAMETERS,) if phase is Phase.LOAD else _STATES:
        more = after.get(kind, 0) - before.get(kind, 0)
        kinds[kind] = max(0, counted.get(kind, 0) + more)
    return {kind: count for kind, count in kinds.items() if count}


@dataclass(frozen=True)
class _Model:
    """A config that is known by its text."""

    text: str
    config: PretrainedConfig = field(compare=False)


def tensors_of(config: PretrainedConfig, policies: Policies) -> ModelTensors:
    """Shapes of all parameters under `policies`, adapters included.

    Raises:
        UnsupportedError: tensor-parallel ranks cannot share the model.
    """
    model = _Model(config.to_json_string(use_diff=False), config)
    quantised, ranks = policies.quantisation is not None, policies.sharding.tensor_parallel
    return _tensors(model, policies.adapter, ranks, quantised=quantised)


@lru_cache(maxsize=64)
def _tensors(
    described: _Model, adapter: AdapterPolicy | None, ranks: int, *, quantised: bool
) -> ModelTensors:
    """See `tensors_of`; a search asks for the same ones again and again."""
    if adapter is not None:
        import_library()
    with torch.device("meta"):
        model = build_model(described.config, torch.float32)
        linears = linear_layers(model) if quantised else []
        packed = {getattr(parent, name).weight for parent, name in linears}
        adapted = apply_adapter(model, adapter)
    dims = divided_dims(adapted, model, ranks) if ranks > 1 else {}
    named = (
        (
            name,
            Tensor(
                tuple(parameter.shape),
                trainable=parameter.requires_grad,
                divided_dim=dims.get(parameter),
                quantised=parameter in packed,
            ),
        )
        for name, parameter in adapted.named_parameters()
    )
    return ModelTensors.grouped(named, tied=bool(described.config.tie_word_embeddings))
