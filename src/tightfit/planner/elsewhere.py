"""What the same job would take with other engines, set up as their users commonly do.

One process stands for the Hugging Face Trainer on a card; DDP, FSDP1, FSDP2 and DeepSpeed are
torch's and DeepSpeed's own. Numbers come from `dry_run.other_engines`; this file only says which of
them can do the job, and how they would be configured for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from transformers import PretrainedConfig

from tightfit.bill.optimizers import moment_bytes
from tightfit.bill.other_engines import OtherEngine, OtherLoss, OtherRun, Recompute, Widths
from tightfit.bill.other_states import disk_bytes, host_bytes
from tightfit.bill.runtime import Capability
from tightfit.bill.textbook import base_bytes_per_parameter
from tightfit.dry_run.other_engines import other_bill
from tightfit.engine.adapter import import_library
from tightfit.policies import AttentionKernel, LossKind, Policies, Tier

_WIDE = (4096, 4096)  # so large that what optimizers keep per tensor or per row is no matter
_ENGINES = {
    0: (OtherEngine.DDP,),
    1: (OtherEngine.ZERO1,),
    2: (OtherEngine.ZERO2,),
    3: (OtherEngine.ZERO3, OtherEngine.FSDP2, OtherEngine.FSDP1),
}
_DEEPSPEED = (OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3)


@dataclass(frozen=True)
class Elsewhere:
    """What one card takes with another engine.

    Attributes:
        allocated_bytes: highest total of tensors, as `torch.cuda.max_memory_allocated`.
        device_bytes: what the driver shows: allocator, context and communication library too.
        host_bytes, disk_bytes: of model states that a rank keeps there, without buffers.
    """

    engine: OtherEngine
    allocated_bytes: int
    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


def price_with(
    config: PretrainedConfig,
    policies: Policies,
    sequence_length: int,
    card: Capability,
    engine: OtherEngine,
    **details: Any,
) -> Elsewhere:
    """What one card would take with `engine`, whether the job is a usual one for it or not.

    Args:
        config: of the model.
        policies: the job's; what the engine cannot do of them leaves it out.
        sequence_length: tokens of the longest sequence.
        details: fields of `OtherRun` that the engine was given.
    """
    if policies.adapter is not None:
        import_library()
    run = _run(policies, sequence_length, card, engine)
    return _price(config, replace(run, **details))


def price_elsewhere(
    config: PretrainedConfig, policies: Policies, sequence_length: int, card: Capability
) -> list[Elsewhere]:
    """The engines that can do the job, each with what one card would take.

    Args:
        config: of the model.
        policies: the job's; what an engine cannot do of them leaves it out.
        sequence_length: tokens of the longest sequence.
    """
    if policies.adapter is not None:
        import_library()
    return [_price(config, run) for run in _runs(policies, sequence_length, card)]


def _price(config: PretrainedConfig, run: OtherRun) -> Elsewhere:
    bill = other_bill(config, run)
    return Elsewhere(
        run.engine,
        round(bill.allocated_bytes),
        round(bill.reserved_bytes + bill.outside_bytes),
        round(host_bytes(run, bill.counts)),
        round(disk_bytes(run, bill.counts)),
    )


def _runs(policies: Policies, sequence_length: int, card: Capability) -> Iterator[OtherRun]:
    sharding, placement = policies.sharding, policies.placement
    if sharding.tensor_parallel > 1 or sharding.pipeline_parallel > 1:
        return  # of these engines only Megatron has them, and it has models of its own
    if Tier.NVME in (placement.optimizer_states, placement.parameters):
        return
    adapter = policies.adapter
    if adapter is not None and (adapter.modules_to_save or adapter.dora):
        return  # copies that peft trains, and weights that it makes: nobody has counted them
    engines = _ENGINES[sharding.zero_stage] if sharding.ranks > 1 else (OtherEngine.SINGLE,)
    for engine in engines:
        yield _run(policies, sequence_length, card, engine)


def _run(
    policies: Policies, sequence_length: int, card: Capability, engine: OtherEngine
) -> OtherRun:
    placement = policies.placement
    return OtherRun(
        engine=engine,
        micro_batch_size=policies.batch.micro_batch_size,
        sequence_length=sequence_length,
        shards=policies.sharding.ranks,
        accumulates=policies.batch.accumulation_steps > 1,
        widths=_widths(policies, engine),
        adapter=policies.adapter,
        autocast=_autocasts(policies, engine),
        recompute=_recompute(policies),
        flash_attention=policies.attention.kernel is not AttentionKernel.EAGER,
        loss=_loss(policies),
        offload_activations=placement.activations is not Tier.DEVICE,
        offload_parameters=placement.parameters is not Tier.DEVICE,
        offload_optimizer=placement.optimizer_states is not Tier.DEVICE,
        offload_gradients=placement.gradients is not Tier.DEVICE,
        optimizer_on_disk=placement.optimizer_states is Tier.NVME,
        parameters_on_disk=placement.parameters is Tier.NVME,
        capability=card,
    )


def _autocasts(policies: Policies, engine: OtherEngine) -> bool:
    """The Trainer and DDP train 16 bits as fp32 parameters under autocast, adapters apart."""
    plain = engine in (OtherEngine.SINGLE, OtherEngine.DDP)
    return plain and policies.adapter is None and policies.precision.parameter_bytes < 4


def _widths(policies: Policies, engine: OtherEngine) -> Widths:
    narrow = policies.precision.parameter_bytes
    states = moment_bytes(_WIDE, policies.optimizer.name) / prod(_WIDE)
    if policies.adapter is not None:
        base = policies.quantisation
        quantised = None if base is None else base_bytes_per_parameter(base)
        return Widths(narrow, narrow, 4, 4, 0, states, adapter=4, quantised=quantised)
    if engine in _DEEPSPEED and narrow < 4:
        return Widths(narrow, narrow, narrow, narrow, 4, states)
    wide = 4  # fp32 parameters, or fp32 shards that are gathered in 16 bits
    return Widths(wide, narrow, wide, wide, 0, states)


def _recompute(policies: Policies) -> Recompute:
    if not policies.checkpointing.enabled:
        return Recompute.NONE
    return Recompute.FULL if policies.checkpointing.every == 1 else Recompute.ALTERNATE


def _loss(policies: Policies) -> OtherLoss:
    if policies.loss.kind is LossKind.FULL:
        return OtherLoss()
    return OtherLoss(keep_logits=False, recompute_tokens=policies.loss.chunk_tokens)
