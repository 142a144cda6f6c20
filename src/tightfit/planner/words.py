"""Policies in the words of the job's keys, and in a line for people. Knows no numbers of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.policies import (
    AttentionKernel,
    LossKind,
    Master,
    OptimizerName,
    PlacementPolicy,
    Policies,
    ShardingPolicy,
    Tier,
)


def techniques(policies: Policies) -> dict[str, str]:
    """The choices in the words of the job's keys."""
    batch, placement, sharding = policies.batch, policies.placement, policies.sharding
    chosen = {
        "batch": f"{batch.micro_batch_size} x {batch.accumulation_steps}",
        "gradient_checkpointing": checkpointing_word(policies),
        "loss": str(policies.loss.kind),
        "attention": str(policies.attention.kernel),
        "offload_optimizer": _PLACE_WORDS[placement.optimizer_states],
        "offload_param": _PLACE_WORDS[placement.parameters],
        "offload_activations": str(placement.activations is not Tier.DEVICE).lower(),
        **_placement_numbers(placement),
        "precision": policies.precision.parameters,
        "optim": str(policies.optimizer.name),
        "finetuning_type": "full" if policies.adapter is None else "lora",
    }
    if policies.optimizer.split_master:
        chosen["optim_master"] = str(policies.optimizer.master)
    if policies.adapter is not None:
        chosen["lora_rank"] = str(policies.adapter.rank)
    if policies.quantisation is not None:
        chosen["quantization_bit"] = str(policies.quantisation.bits)
    if sharding.ranks > 1:
        chosen |= {
            "num_gpus": str(sharding.ranks),
            "zero_stage": str(sharding.zero_stage),
            "tensor_parallel_size": str(sharding.tensor_parallel),
            "pipeline_parallel_size": str(sharding.pipeline_parallel),
        }
        if sharding.replicas > 1:
            chosen["data_parallel_replicas"] = str(sharding.replicas)
        if sharding.pipeline_parallel > 1:
            chosen["pipeline_schedule"] = str(sharding.pipeline_schedule)
        if sharding.virtual_stages > 1:
            chosen["virtual_pipeline_stages"] = str(sharding.virtual_stages)
        if sharding.stage_layers:
            chosen["pipeline_layers"] = ",".join(map(str, sharding.stage_layers))
    return chosen


def _placement_numbers(placement: PlacementPolicy) -> dict[str, str]:
    """How much leaves and how; only of what leaves."""
    numbers: dict[str, str] = {}
    if placement.optimizer_states is not Tier.DEVICE:
        numbers["offload_optimizer_fraction"] = f"{placement.optimizer_fraction:g}"
        numbers["lazy_step"] = str(placement.lazy_step).lower()
    if placement.parameters is not Tier.DEVICE:
        numbers["offload_param_fraction"] = f"{placement.parameter_fraction:g}"
    if {placement.activations, placement.parameters} != {Tier.DEVICE}:
        numbers["offload_prefetch"] = str(placement.prefetch)
    return numbers


_PLACE_WORDS = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.NVME: "nvme"}
_PLACE_NAMES = {Tier.HOST: "host", Tier.NVME: "NVMe"}


def checkpointing_word(policies: Policies) -> str:
    """What the job's key `gradient_checkpointing` says."""
    if policies.checkpointing.enabled and policies.checkpointing.every > 1:
        return "selective"
    return str(policies.checkpointing.enabled).lower()


def describe_policies(policies: Policies) -> str:
    """One line: the batch and the techniques that are on."""
    batch = policies.batch
    parts = [f"micro-batch {batch.micro_batch_size} x {batch.accumulation_steps}"]
    parts += _describe_sharding(policies)
    parts += _describe_numerics(policies)
    if policies.loss.kind is not LossKind.FULL:
        parts.append(f"{policies.loss.kind} loss")
    if policies.checkpointing.enabled:
        parts.append(
            "selective checkpointing" if policies.checkpointing.every > 1 else "checkpointing"
        )
    parts += _describe_placement(policies)
    return ", ".join(parts)


def _describe_sharding(policies: Policies) -> Iterator[str]:
    sharding = policies.sharding
    if sharding.ranks == 1:
        return
    yield f"{sharding.ranks} ranks"
    if sharding.data_parallel > 1:
        yield f"ZeRO-{sharding.zero_stage}" if sharding.zero_stage else "data parallel"
    if sharding.replicas > 1:
        yield f"{sharding.replicas} replicas"
    if sharding.tensor_parallel > 1:
        yield f"tensor parallel {sharding.tensor_parallel}"
    if sharding.pipeline_parallel > 1:
        times = f" x {sharding.virtual_stages}" if sharding.virtual_stages > 1 else ""
        yield f"pipeline of {sharding.pipeline_parallel}{times} stages{_cut(sharding)}"


def _cut(sharding: ShardingPolicy) -> str:
    return f" (layers {layers_of_runs(sharding)})" if sharding.stage_layers else ""


def layers_of_runs(sharding: ShardingPolicy) -> str:
    """How many each has, as people say it."""
    return ", ".join(map(str, sharding.stage_layers))


_MASTERS = {Master.SPLIT: "split master", Master.SPLIT_8: "split master of 24 bits"}


def _describe_numerics(policies: Policies) -> Iterator[str]:
    if policies.adapter is not None:
        whole = policies.adapter.modules_to_save
        name = "DoRA" if policies.adapter.dora else "LoRA"
        yield f"{name} rank {policies.adapter.rank}" + (
            f" with {', '.join(whole)}" if whole else ""
        )
    if policies.quantisation is not None:
        yield f"{policies.quantisation.bits}-bit base"
    if policies.optimizer.name is not OptimizerName.ADAMW:
        yield str(policies.optimizer.name)
    if policies.optimizer.split_master:
        yield _MASTERS[policies.optimizer.master]
    if policies.attention.kernel is not AttentionKernel.SDPA:
        yield f"{policies.attention.kernel} attention"


def _describe_placement(policies: Policies) -> Iterator[str]:
    placement = policies.placement
    if placement.optimizer_states is not Tier.DEVICE:
        share, lazy = percent(placement.optimizer_fraction), placement.lazy_step
        yield share + _what_is_updated(placement) + (", lazy step" if lazy else "")
    if placement.parameters is not Tier.DEVICE:
        share = percent(placement.parameter_fraction)
        yield f"{share}parameters on {_PLACE_NAMES[placement.parameters]}"
    if placement.activations is not Tier.DEVICE:
        yield f"activations on {_PLACE_NAMES[placement.activations]}"


def _what_is_updated(placement: PlacementPolicy) -> str:
    gradients, states = placement.gradients, placement.optimizer_states
    if gradients is states or gradients is Tier.DEVICE:
        return f"gradients + optimizer on {_PLACE_NAMES[states]}"
    return f"optimizer on {_PLACE_NAMES[states]} + gradients on {_PLACE_NAMES[gradients]}"


def percent(fraction: float) -> str:
    """A share of the layers as it stands before what they have; nothing before all of it."""
    return "" if fraction == 1 else f"{100 * fraction:.3g}% of "


def count_techniques(policies: Policies) -> int:
    """How many techniques are on, each stage of ZeRO one; of equally fast plans the one with fewest
    wins."""
    placement = policies.placement
    return (
        (policies.adapter is not None)
        + (policies.quantisation is not None)
        + (policies.loss.kind is not LossKind.FULL)
        + policies.checkpointing.enabled
        + (placement.optimizer_states is not Tier.DEVICE)
        + (placement.parameters is not Tier.DEVICE)
        + (placement.activations is not Tier.DEVICE)
        + (policies.batch.accumulation_steps > 1)
        + _count_sharding(policies.sharding)
    )


def _count_sharding(sharding: ShardingPolicy) -> int:
    groups = (sharding.tensor_parallel, sharding.pipeline_parallel, sharding.replicas)
    return sharding.zero_stage + sum(size > 1 for size in groups) + bool(sharding.stage_layers)
