"""Which policies a job leaves open, and the plain policies it is compared with.

Turns the keys of a job into lists of choices; knows neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from tightfit.errors import ConfigError
from tightfit.facts.attention import default_attention
from tightfit.facts.job import Job
from tightfit.facts.logits import logit_transform
from tightfit.planner.plan import describe_policies
from tightfit.planner.plan_file import read_policies
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

_TIERS = {"auto": Tier.DEVICE, "none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Options:
    """The choices for each policy; the first of each list is the plain one.

    Attributes:
        fixed: everything that is not a choice.
        lora: the adapters that the job's keys describe, whether it wants them or not.
        lora_if_nothing_fits: what the planner may fall back on; None where the job does not
            allow it or already says it.
    """

    fixed: Policies
    batches: tuple[BatchPolicy, ...]
    losses: tuple[LossPolicy, ...]
    checkpointing: tuple[CheckpointingPolicy, ...]
    placements: tuple[PlacementPolicy, ...]
    lora: AdapterPolicy
    lora_if_nothing_fits: AdapterPolicy | None

    def plain(self) -> Policies:
        """No technique that was not asked for."""
        return next(self.candidates())

    def leanest(self, adapter: AdapterPolicy | None = None) -> list[Policies]:
        """For each placement the smallest batch with every technique that is open."""
        return list(self.candidates(adapter))[-len(self.placements) :]

    def candidates(self, adapter: AdapterPolicy | None = None) -> Iterator[Policies]:
        """Every combination, with `adapter` instead of the job's own if given."""
        for batch, loss, checkpointing, placement in product(
            self.batches, self.losses, self.checkpointing, self.placements
        ):
            yield replace(
                self.fixed,
                batch=batch,
                loss=loss,
                checkpointing=checkpointing,
                placement=placement,
                adapter=adapter or self.fixed.adapter,
            )


def options_of(job: Job, *, precision: str, chunked_loss: bool, attention: str = "sdpa") -> Options:
    """The choices that `job` leaves open.

    Args:
        precision: what `precision: auto` means on this device.
        chunked_loss: whether the model supports it.
        attention: what `attention: auto` means for this model.

    Raises:
        ConfigError: the job asks for a chunked loss that the model does not support.
    """
    if job.loss == "chunked" and not chunked_loss:
        raise ConfigError(
            "loss: chunked does not work for this model, which changes its logits "
            "before the loss; set loss: full"
        )
    full, chunked = LossPolicy(LossKind.FULL), LossPolicy(LossKind.CHUNKED)
    adapter = _adapter(job)
    return Options(
        fixed=Policies(
            precision=PrecisionPolicy(precision if job.precision == "auto" else job.precision),
            optimizer=_optimizer(job),
            adapter=adapter if job.finetuning_type == "lora" else None,
            quantisation=_quantisation(job),
            attention=AttentionPolicy(
                AttentionKernel(attention if job.attention == "auto" else job.attention)
            ),
            sharding=_sharding(job),
        ),
        batches=_batches(job),
        losses=_open(job.loss, {"full": full, "chunked": chunked}) if chunked_loss else (full,),
        checkpointing=_checkpointing(job),
        placements=_placements(job),
        lora=adapter,
        lora_if_nothing_fits=(
            adapter if "lora" in job.allow and job.finetuning_type == "full" else None
        ),
    )


def model_options(job: Job, config: Mapping[str, Any], precision: str) -> Options:
    """The choices that `job` leaves open for the model of a config.

    Raises:
        ConfigError: the job asks for a chunked loss that the model does not support.
    """
    return options_of(
        job,
        precision=precision,
        chunked_loss=logit_transform(config) is None,
        attention=default_attention(config),
    )


def planned_policies(job: Job, options: Options) -> Policies:
    """The policies of the job's plan file, with the job's own optimizer.

    Raises:
        ConfigError: the file is wrong, or contradicts the job.
    """
    assert job.plan is not None
    policies = read_policies(Path(job.plan))
    check_agrees(policies, options, job)
    return replace(policies, optimizer=options.fixed.optimizer)


def check_agrees(policies: Policies, options: Options, job: Job) -> None:
    """See that a plan file's policies are among the choices that the job leaves open.

    Raises:
        ConfigError: a key of the job says something else.
    """
    fixed = options.fixed
    open_losses = {loss.kind for loss in options.losses}
    agreement = {
        "train_batch_size": policies.global_batch_size == job.global_batch_size,
        "per_device_train_batch_size": policies.batch in options.batches,
        "loss": policies.loss.kind in open_losses,
        "gradient_checkpointing": policies.checkpointing in options.checkpointing,
        "offload_optimizer": policies.placement in options.placements,
        "precision": job.precision in ("auto", policies.precision.parameters),
        "attention": policies.attention == fixed.attention,
        "num_gpus": policies.sharding.ranks == fixed.sharding.ranks,
        "zero_stage": policies.sharding == fixed.sharding or job.zero_stage == "auto",
        "quantization_bit": policies.quantisation == fixed.quantisation,
        "finetuning_type": fixed.adapter is None or policies.adapter is not None,
        "missing allow: [lora]": policies.adapter is None
        or job.finetuning_type == "lora"
        or "lora" in job.allow,
        "lora_rank": policies.adapter is None
        or "lora_rank" not in job.model_fields_set
        or policies.adapter.rank == job.lora_rank,
    }
    contradicted = [
        f"{key}: {getattr(job, key)}" if key in Job.model_fields else key
        for key, agrees in agreement.items()
        if not agrees
    ]
    if contradicted:
        raise ConfigError(
            f"the plan ({describe_policies(policies)}) contradicts the job's "
            f"{', '.join(contradicted)}; change the one or the other"
        )


def without_technique(policies: Policies) -> Iterator[tuple[str, Policies]]:
    """`policies` with one of its techniques taken away, by the name of that technique."""
    batch = policies.batch
    if batch.accumulation_steps > 1:
        whole = BatchPolicy(batch.sequences_per_rank, 1)
        yield "accumulation", replace(policies, batch=whole)
    if policies.loss.kind is LossKind.CHUNKED:
        yield "chunked loss", replace(policies, loss=LossPolicy(LossKind.FULL))
    if policies.checkpointing.enabled:
        yield "gradient checkpointing", replace(policies, checkpointing=CheckpointingPolicy())
    placement = policies.placement
    if placement.optimizer_states is not Tier.DEVICE:
        nearer = replace(placement, gradients=Tier.DEVICE, optimizer_states=Tier.DEVICE)
        where = (
            "the host" if placement.optimizer_states is Tier.HOST else placement.optimizer_states
        )
        yield f"gradients and optimizer on {where}", replace(policies, placement=nearer)
    if policies.adapter is not None:
        yield "LoRA", replace(policies, adapter=None)


def _open(value: str, choices: dict[str, Choice]) -> tuple[Choice, ...]:
    """All choices for `auto`, else the one that is named."""
    return tuple(choices.values()) if value == "auto" else (choices[value],)


def _placements(job: Job) -> tuple[PlacementPolicy, ...]:
    """The one on the device first."""
    choices = ("none", "cpu") if job.offload_optimizer == "auto" else (job.offload_optimizer,)
    return tuple(
        PlacementPolicy(
            gradients=Tier.DEVICE if choice == "none" else Tier.HOST,
            optimizer_states=_TIERS[choice],
            parameters=_TIERS[job.offload_param],
            activations=Tier.HOST if job.offload_activations == "true" else Tier.DEVICE,
        )
        for choice in choices
    )


def _checkpointing(job: Job) -> tuple[CheckpointingPolicy, ...]:
    if job.gradient_checkpointing == "selective":
        return (CheckpointingPolicy(True, every=2),)
    off, on = CheckpointingPolicy(False), CheckpointingPolicy(True)
    return _open(job.gradient_checkpointing, {"false": off, "true": on})


def _sharding(job: Job) -> ShardingPolicy:
    return ShardingPolicy(
        job.num_gpus,
        0 if job.zero_stage == "auto" else job.zero_stage,
        job.tensor_parallel_size,
        job.pipeline_parallel_size,
    )


def _quantisation(job: Job) -> QuantisationPolicy | None:
    return None if job.quantization_bit is None else QuantisationPolicy(job.quantization_bit)


def _batches(job: Job) -> tuple[BatchPolicy, ...]:
    """The largest micro-batch first."""
    total = job.global_batch_size // job.data_parallel_ranks
    if job.per_device_train_batch_size != "auto":
        micro = job.per_device_train_batch_size
        return (BatchPolicy(micro, total // micro),)
    if job.gradient_accumulation_steps != "auto":
        steps = job.gradient_accumulation_steps
        return (BatchPolicy(total // steps, steps),)
    return tuple(
        BatchPolicy(micro, total // micro) for micro in range(total, 0, -1) if total % micro == 0
    )


def _optimizer(job: Job) -> OptimizerPolicy:
    return OptimizerPolicy(
        name=OptimizerName(job.optim),
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        betas=(job.adam_beta1, job.adam_beta2),
        epsilon=job.adam_epsilon,
        max_grad_norm=job.max_grad_norm,
    )


def _adapter(job: Job) -> AdapterPolicy:
    targets = (
        ()
        if job.lora_target == "all"
        else tuple(name.strip() for name in job.lora_target.split(",") if name.strip())
    )
    alpha = 2.0 * job.lora_rank if job.lora_alpha is None else job.lora_alpha
    return AdapterPolicy(job.lora_rank, alpha, job.lora_dropout, targets)
