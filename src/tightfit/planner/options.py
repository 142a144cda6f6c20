"""Which policies a job leaves open, and the plain policies it is compared with.

Turns the keys of a job into lists of choices; knows neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from tightfit.errors import ConfigError
from tightfit.facts.attention import default_attention
from tightfit.facts.job import Job
from tightfit.facts.logits import logit_transform
from tightfit.planner.fitting import possible
from tightfit.planner.placements import PlacementChoices, placement_choices, without_placement
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
    PipelineSchedule,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Options:
    """The choices for each policy; the first of each list is the plain one.

    Attributes:
        fixed: everything that is not a choice.
        lora: the adapters that the job's keys describe, whether it wants them or not.
        lora_if_nothing_fits: what the planner may fall back on; None where the job does not
            allow it or already says it.
        lora_placement: where its states may live.
    """

    fixed: Policies
    batches: tuple[BatchPolicy, ...]
    losses: tuple[LossPolicy, ...]
    checkpointing: tuple[CheckpointingPolicy, ...]
    placement: PlacementChoices
    shardings: tuple[ShardingPolicy, ...]
    lora: AdapterPolicy
    lora_if_nothing_fits: AdapterPolicy | None
    lora_placement: PlacementChoices

    def plain(self) -> Policies:
        """No technique that was not asked for: the nearest to it that the engine can do."""
        nearest = next(self.candidates())
        return next(filter(possible, self.candidates()), nearest)

    def leanest(self, adapter: AdapterPolicy | None = None) -> list[Policies]:
        """The smallest batch with every technique that is open, for each placement and each loss
        that saves: which saves most is a matter of the vocabulary."""
        losses = [loss for loss in self.losses if loss.kind is not LossKind.FULL] or self.losses
        leanest = (self.batches[-1], self.checkpointing[-1], self.shardings[-1])
        return [
            policies
            for policies in self.candidates(adapter)
            if (policies.batch, policies.checkpointing, policies.sharding) == leanest
            and policies.loss in losses
        ]

    def placements(self, adapter: AdapterPolicy | None = None) -> tuple[PlacementPolicy, ...]:
        """The nearest to the device first; see `candidates`."""
        return (self.placement if adapter is None else self.lora_placement).all()

    def open_fraction(self, policies: Policies) -> str | None:
        """The field of the placement that says how much leaves and is the planner's to lower."""
        fell_back = (policies.adapter is None) != (self.fixed.adapter is None)
        choices = self.lora_placement if fell_back else self.placement
        return choices.open_fraction(policies.placement)

    def candidates(self, adapter: AdapterPolicy | None = None) -> Iterator[Policies]:
        """Every combination, with `adapter` instead of the job's own if given. What leaves, leaves
        whole where its fraction is open."""
        fixed = self.fixed if adapter is None else with_adapter(self.fixed, adapter)
        for batch, loss, checkpointing, placement, sharding in product(
            self.batches,
            self.losses,
            self.checkpointing,
            self.placements(adapter),
            self.shardings,
        ):
            yield replace(
                fixed,
                batch=batch,
                loss=loss,
                checkpointing=checkpointing,
                placement=placement,
                sharding=sharding,
            )


def options_of(
    job: Job,
    *,
    precision: str,
    chunked_loss: bool,
    attention: str = "sdpa",
    on_card: bool = False,
) -> Options:
    """The choices that `job` leaves open.

    Args:
        precision: what `precision: auto` means on this device.
        chunked_loss: whether the model supports it.
        attention: what `attention: auto` means for this model.
        on_card: whether the device is a card.

    Raises:
        ConfigError: the job asks for a chunked loss that the model does not support, or for a
            split master in another precision than bf16.
    """
    if job.loss in ("chunked", "sliced") and not chunked_loss:
        raise ConfigError(
            f"loss: {job.loss} does not work for this model, which changes its logits "
            "before the loss; set loss: full"
        )
    precision = precision if job.precision == "auto" else job.precision
    _check_master(job, precision)
    losses = {str(kind): LossPolicy(kind) for kind in LossKind}
    adapter = _adapter(job)
    return Options(
        fixed=Policies(
            precision=PrecisionPolicy(precision),
            optimizer=_optimizer(job),
            adapter=adapter if job.finetuning_type == "lora" else None,
            quantisation=_quantisation(job),
            attention=AttentionPolicy(
                AttentionKernel(attention if job.attention == "auto" else job.attention)
            ),
            sharding=_shardings(job)[0],
        ),
        batches=_batches(job),
        shardings=_shardings(job),
        losses=_open(job.loss, losses) if chunked_loss else (losses["full"],),
        checkpointing=_checkpointing(job),
        placement=placement_choices(
            job,
            on_card=on_card,
            trains_parameters=job.finetuning_type == "full",
            together=job.optim_master == "split",
        ),
        lora=adapter,
        lora_if_nothing_fits=(
            adapter if "lora" in job.allow and job.finetuning_type == "full" else None
        ),
        lora_placement=placement_choices(job, on_card=on_card, trains_parameters=False),
    )


def _check_master(job: Job, precision: str) -> None:
    """A split master is for parameters in bf16, whoever chose their precision.

    Raises:
        ConfigError: they are not.
    """
    if job.optim_master == "split" and precision != "bf16":
        raise ConfigError(
            f"optim_master: split keeps the bits that bf16 parameters lack, and precision: "
            f"{job.precision} is {precision} here; set precision: bf16, or optim_master: fp32"
        )


def model_options(
    job: Job, config: Mapping[str, Any], precision: str, *, on_card: bool = False
) -> Options:
    """The choices that `job` leaves open for the model of a config; raises as `options_of`."""
    return options_of(
        job,
        precision=precision,
        chunked_loss=logit_transform(config) is None,
        attention=default_attention(config),
        on_card=on_card,
    )


def with_adapter(policies: Policies, adapter: AdapterPolicy) -> Policies:
    """`policies` with `adapter`, whose parameters are fp32 and have no master to split."""
    optimizer = replace(policies.optimizer, split_master=False)
    return replace(policies, adapter=adapter, optimizer=optimizer)


def without_technique(policies: Policies) -> Iterator[tuple[str, Policies]]:
    """`policies` with one of its techniques taken away, by the name of that technique."""
    batch = policies.batch
    if batch.accumulation_steps > 1:
        whole = BatchPolicy(batch.sequences_per_rank, 1)
        yield "accumulation", replace(policies, batch=whole)
    if policies.loss.kind is not LossKind.FULL:
        yield f"{policies.loss.kind} loss", replace(policies, loss=LossPolicy(LossKind.FULL))
    if policies.checkpointing.enabled:
        yield "gradient checkpointing", replace(policies, checkpointing=CheckpointingPolicy())
    if policies.sharding.zero_stage:
        plain = replace(policies.sharding, zero_stage=0)
        yield f"ZeRO-{policies.sharding.zero_stage}", replace(policies, sharding=plain)
    yield from without_placement(policies)
    if policies.adapter is not None and policies.quantisation is None:
        yield "LoRA", _without_adapter(policies)


def _without_adapter(policies: Policies) -> Policies:
    """All parameters trained: where they are off the device, so are their states."""
    placement = policies.placement
    if placement.parameters is not Tier.DEVICE:
        placement = replace(
            placement,
            gradients=Tier.HOST,
            optimizer_states=placement.parameters,
            optimizer_fraction=1.0,
        )
    return replace(policies, adapter=None, placement=placement)


def _open(value: str, choices: dict[str, Choice]) -> tuple[Choice, ...]:
    """All choices for `auto`, else the one that is named."""
    return tuple(choices.values()) if value == "auto" else (choices[value],)


def _checkpointing(job: Job) -> tuple[CheckpointingPolicy, ...]:
    if job.gradient_checkpointing == "selective":
        return (CheckpointingPolicy(True, every=2),)
    off, on = CheckpointingPolicy(False), CheckpointingPolicy(True)
    return _open(job.gradient_checkpointing, {"false": off, "true": on})


def _shardings(job: Job) -> tuple[ShardingPolicy, ...]:
    """What shares out least first; with one data-parallel rank there is nothing to share."""
    stages: tuple[int, ...] = (0, 1, 2, 3) if job.data_parallel_ranks > 1 else (0,)
    replicas = job.data_parallel_replicas
    if replicas > 1:
        stages = (3,)  # replicas are of what is shared out
    if job.zero_stage != "auto":
        stages = (job.zero_stage,)
    width = (job.tensor_parallel_size, job.pipeline_parallel_size)
    schedule = PipelineSchedule(job.pipeline_schedule)
    return tuple(ShardingPolicy(job.ranks, stage, *width, replicas, schedule) for stage in stages)


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
        split_master=job.optim_master == "split",
    )


def _adapter(job: Job) -> AdapterPolicy:
    targets = (
        ()
        if job.lora_target == "all"
        else tuple(name.strip() for name in job.lora_target.split(",") if name.strip())
    )
    alpha = 2.0 * job.lora_rank if job.lora_alpha is None else job.lora_alpha
    return AdapterPolicy(job.lora_rank, alpha, job.lora_dropout, targets)
