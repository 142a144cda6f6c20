"""Applies a plan's policies to a model, in the one order in which they work.

First which layers are this rank's, then what the base is made of; then adapters, since they decide
what is trained; then who has which part of each matrix, adapters' included; then what changes
forward (attention, loss, checkpointing); then who holds which shard of all that; then gradients and
optimizer, which need the final list of parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.engine.activations import ActivationOffload
from tightfit.engine.adapter import apply_adapter
from tightfit.engine.attention import apply_attention
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.disk_gradients import DiskGradients
from tightfit.engine.dora import check_dora, take_magnitudes
from tightfit.engine.elsewhere import Elsewhere
from tightfit.engine.engine import Engine
from tightfit.engine.gradients import (
    DeviceGradients,
    GradientStore,
    HostGradients,
    LateHostGradients,
    SeveralStores,
)
from tightfit.engine.host_threads import prepare_update_thread
from tightfit.engine.lazy import DueUpdates
from tightfit.engine.loss import apply_loss
from tightfit.engine.loss_scale import LossScale
from tightfit.engine.mesh import Dimension, Mesh
from tightfit.engine.optimizer import PlacedOptimizer
from tightfit.engine.pipeline import DiskTier
from tightfit.engine.placement import state_tiers
from tightfit.engine.quantisation import apply_quantisation, is_quantised, quantising
from tightfit.engine.ranks import Ranks
from tightfit.engine.sharding import apply_sharding
from tightfit.engine.slab import HostSlab
from tightfit.engine.sliced_loss import SlicedLoss
from tightfit.engine.stage_ranks import StageRanks
from tightfit.engine.stage_schedule import Pipeline
from tightfit.engine.stages import Stage, apply_stage
from tightfit.engine.state_dict import serve_state_dicts
from tightfit.engine.streaming import ParameterStream
from tightfit.engine.supported import check_engine_can
from tightfit.engine.tensor_parallel import apply_tensor_parallel
from tightfit.engine.transfer import Transfer
from tightfit.engine.units import Unit, units_of
from tightfit.engine.unloaded import Fill, Unloaded
from tightfit.engine.whole_modules import check_whole_modules, widen
from tightfit.errors import ConfigError
from tightfit.policies import PlacementPolicy, Policies, ShardingPolicy, Tier

_FITTED = "_fitted_by_tightfit"


def fit(
    model: PreTrainedModel,
    policies: Policies,
    *,
    device: torch.device | None = None,
    offload_folder: Path | None = None,
    values: Fill | None = None,
) -> Engine:
    """Make `model` train as `policies` say.

    Args:
        model: a causal language model of transformers, on its device, in its final type. It is
            changed in place; use `engine.model` afterwards (LoRA wraps it). With several ranks,
            the same on each. A base that was quantised while it was loaded stays as it is.
        device: where it computes; where it is, when None. A model whose parameters are not to live
            on the device is best loaded on the host.
        offload_folder: on a fast disk, for what is placed on nvme.
        values: for a model built on the meta device, which may be larger than memory: called with
            each parameter's name, a tensor on the host to fill, and which region of the parameter
            that is, one at a time. Each of several ranks asks for its own part.

    Raises:
        UnsupportedError: the model cannot do what a policy asks.
        ConfigError: a LoRA target that the model does not have, a model that was fitted before,
            nothing in it to train, or other ranks than the policies are for.
    """
    if hasattr(model, _FITTED):
        raise ConfigError(
            "this model was fitted before, and its forward and gradients belong to that engine; "
            "load it again"
        )
    check_engine_can(policies)
    check_dora(policies)
    ledger.set_phase(Phase.INIT)
    device = device or _device_of(model)
    check_whole_modules(model, policies.adapter, policies.sharding.pipeline_parallel)
    mesh = Mesh(policies.sharding, device)
    stage = _stage(model, mesh, policies.sharding)
    if not is_quantised(model):
        dtype = model.dtype
        apply_quantisation(model, policies.quantisation, device)
        values = None if values is None else quantising(values, model, dtype)
    widen(model, policies.adapter)
    unloaded = Unloaded(model, device, values)
    adapted = apply_adapter(model, policies.adapter)
    if policies.adapter is not None:
        _adopt(adapted)
    if stage is not None:
        stage.check_adapters()
    with unloaded.as_shapes(adapted) if mesh.size(Dimension.TENSOR) > 1 else nullcontext():
        vocabulary = apply_tensor_parallel(adapted, model, mesh)
    apply_attention(model, policies.attention)
    sliced, loss_scale = None, None
    if policies.precision.parameters == "fp16":
        loss_scale = LossScale(policies.optimizer.loss_scale)
    if stage is None or stage.is_last:
        sliced = apply_loss(model, policies.loss, vocabulary, loss_scale)
    apply_checkpointing(model, policies.checkpointing)
    if not any(p.requires_grad for p in adapted.parameters()):
        raise ConfigError("nothing to train: all parameters of the model are frozen")
    with unloaded.as_shapes(adapted) if mesh.size(Dimension.SHARD) > 1 else nullcontext():
        ranks = apply_sharding(adapted, model, policies, mesh)
    pipeline = None
    if stage is not None:
        group, schedule = mesh.group(Dimension.PIPELINE), policies.sharding.pipeline_schedule
        ranks = StageRanks(ranks, group, stage.copies, device)
        pipeline = Pipeline(stage, adapted, group, schedule, ranks, device, loss_scale)
    setattr(model, _FITTED, True)
    adapted.train()
    elsewhere = Elsewhere(Transfer(device), HostSlab(device), _disk(policies, offload_folder))
    prepared = _Prepared(adapted, model, sliced, unloaded, ranks, pipeline, loss_scale)
    return _place(prepared, policies, elsewhere)


@dataclass(frozen=True)
class _Prepared:
    """A model with everything but placement.

    Attributes:
        root: what computes; around `model`, peft's where there are adapters.
        sliced: its loss in slices, if it has one.
        unloaded: its parameters that have no values yet.
        pipeline: if it is a stage of one.
    """

    root: nn.Module
    model: PreTrainedModel
    sliced: SlicedLoss | None
    unloaded: Unloaded
    ranks: Ranks
    pipeline: Pipeline | None
    loss_scale: LossScale | None


def _stage(model: PreTrainedModel, mesh: Mesh, sharding: ShardingPolicy) -> Stage | None:
    """Take out what other stages have, before anything is loaded or made for it."""
    stages = mesh.size(Dimension.PIPELINE)
    if stages == 1:
        return None
    number = mesh.rank(Dimension.PIPELINE)
    return apply_stage(model, number, stages, sharding.virtual_stages, sharding.stage_layers)


def _device_of(model: nn.Module) -> torch.device:
    """Where a model is; the host if it is nowhere yet."""
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _place(prepared: _Prepared, policies: Policies, elsewhere: Elsewhere) -> Engine:
    """Put everything where it belongs.

    Whoever keeps something on the host says first how much, so that its memory is one piece.
    """
    placement, root, ranks = policies.placement, prepared.root, prepared.ranks
    units = units_of(root, prepared.model, gathered=policies.sharding.zero_stage > 0)
    tiers = state_tiers(units, placement)
    trained = {p: tiers[p] for p in root.parameters() if p.requires_grad}
    stream = _stream(units, trained, policies, elsewhere)
    due = _due_updates(placement, elsewhere.device)
    optimizer = PlacedOptimizer(units, policies, trained, elsewhere, stream, ranks, due)
    gradients = _gradient_store(trained, placement, elsewhere)
    elsewhere.allocate()
    unloaded = prepared.unloaded
    with ledger.phase(Phase.LOAD) if unloaded else nullcontext():
        if stream is not None:
            stream.adopt(unloaded.values)
            stream.is_final = optimizer.is_final
            _move_the_rest(root, stream, elsewhere.device)
        unloaded.load_the_rest(lambda p: stream is not None and stream.has(p))
        if policies.adapter is not None and policies.adapter.dora:
            take_magnitudes(root)
    optimizer.create_states()
    _before_use(units, optimizer, stream)
    if placement.activations is not Tier.DEVICE:
        ActivationOffload(root, units, placement, elsewhere.transfer)
    if prepared.sliced is not None:
        _place_vocabulary(prepared.sliced, units, stream, gradients, ranks)
    serve_state_dicts(root, stream, optimizer.drain)
    steps = policies.batch.accumulation_steps
    return Engine(
        root, optimizer, gradients, ranks, steps, stream, prepared.pipeline, prepared.loss_scale
    )


def _stream(
    units: Sequence[Unit],
    trained: Mapping[nn.Parameter, Tier],
    policies: Policies,
    elsewhere: Elsewhere,
) -> ParameterStream | None:
    """What streams: all but adapters that are updated on the device, where they stay.

    Those that are updated on the host live there, wherever their base does: they are small.
    """
    placement, transfer, slab = policies.placement, elsewhere.transfer, elsewhere.slab
    if placement.parameters is Tier.DEVICE:
        return None
    staying = {parameter for parameter, tier in trained.items() if tier is Tier.DEVICE}
    near = set[nn.Parameter]()
    if policies.adapter is not None:
        near = {parameter for parameter, tier in trained.items() if tier is Tier.HOST}
    far = elsewhere.disk if placement.parameters is Tier.NVME else None
    return ParameterStream(units, placement, transfer, slab, staying, far, near)


def _place_vocabulary(
    sliced: SlicedLoss,
    units: Sequence[Unit],
    stream: ParameterStream | None,
    gradients: GradientStore,
    ranks: Ranks,
) -> None:
    """Its backward reads the output layer's weight, whose gradient may leave as it comes: where it
    goes to the host and is not to be added up over ranks first."""
    if stream is not None:
        unit = next(unit for unit in units if sliced.head.weight in set(unit.parameters))
        sliced.prepare = partial(stream.use, unit)
    if isinstance(gradients, HostGradients) and ranks.data_ranks == 1:
        sliced.deliver = gradients.receive


def _move_the_rest(root: nn.Module, stream: ParameterStream, device: torch.device) -> None:
    """What does not stream may have been loaded on the host, and belongs on the device."""
    for parameter in root.parameters():
        if not stream.has(parameter):
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
            ledger.mark(parameter, Kind.PARAMETERS, Tier.DEVICE)
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
            ledger.mark(getattr(module, name), Kind.BUFFERS, Tier.DEVICE)


def _due_updates(placement: PlacementPolicy, device: torch.device) -> DueUpdates:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return DueUpdates(
        lazy=placement.lazy_step,
        prepare_thread=partial(prepare_update_thread, device, ranks_here),
    )


def _disk(policies: Policies, folder: Path | None) -> DiskTier | None:
    """The disk, if anything is placed there.

    Raises:
        ConfigError: nobody has said where.
    """
    placement = policies.placement
    if Tier.NVME not in (placement.optimizer_states, placement.parameters):
        return None
    if folder is None:
        raise ConfigError(
            "this plan places something on nvme: say in which folder of a fast disk, "
            "fit(model, plan, offload_folder=...)"
        )
    return DiskTier(folder)


def _before_use(
    units: Sequence[Unit], optimizer: PlacedOptimizer, stream: ParameterStream | None
) -> None:
    """What comes before each forward of a unit: first its new values, then they come here."""
    for unit in units:
        unit.before_use.append(partial(optimizer.ready, unit))
        if stream is not None:
            unit.before_use.append(partial(stream.use, unit))
        unit.watch()


def _gradient_store(
    tiers: Mapping[nn.Parameter, Tier],
    placement: PlacementPolicy,
    elsewhere: Elsewhere,
) -> GradientStore:
    """A store for gradients whose update runs on the device, and one for the others."""
    transfer, slab = elsewhere.transfer, elsewhere.slab
    staying = [p for p, tier in tiers.items() if tier is Tier.DEVICE]
    leaving = [p for p, tier in tiers.items() if tier is not Tier.DEVICE]
    if not leaving:
        return DeviceGradients(staying)
    away: GradientStore
    if placement.gradients is Tier.NVME:
        assert elsewhere.disk is not None
        away = DiskGradients(leaving, transfer, elsewhere.disk)
    elif placement.gradients is Tier.HOST:
        away = HostGradients(leaving, transfer, slab)
    else:
        away = LateHostGradients(leaving, transfer, slab)
    return SeveralStores(list(tiers), [DeviceGradients(staying), away]) if staying else away


def _adopt(module: nn.Module) -> None:
    """Book the adapters' own parameters as parameters."""
    counting = ledger.active()
    if counting is not None:
        counting.adopt(module)
