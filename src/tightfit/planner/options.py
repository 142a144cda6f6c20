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
from tightfit.facts.placement_keys import SPLIT_MASTERS
from tightfit.facts.rank_keys import divisors
from tightfit.planner.degrees import leanest, shardings_of
from tightfit.planner.fitting import possible
from tightfit.planner.placements import PlacementChoices, placement_choices, without_placement
from tightfit.planner.stage_bounds import in_flight
from tightfit.planner.words import layers_of_runs
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    LossScalePolicy,
    Master,
    OptimizerName,
    OptimizerPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Way:
    """A way to train whose numbers are its own: what is no choice of it, and what is placed where.

    Attributes:
        allow: the words of the job's key `allow` that allow it; none for the job's own way.
        fixed: all policies that are not a choice.
        placement: where its states may live.
    """

    allow: tuple[str, ...]
    fixed: Policies
    placement: PlacementChoices

    @property
    def name(self) -> str:
        """What people call it."""
        return " and ".join(_NAMES[word] for word in self.allow)

    def has(self, policies: Policies) -> bool:
        """Whether `policies` go this way."""
        return _numerics(policies) == _numerics(self.fixed)


_NAMES = {
    "split-master": "a split master",
    "8bit-optimizer": "8-bit optimizer states",
    "compact-optimizer": "AdamW in 7 bytes per parameter",
    "lora": "LoRA",
    "qlora": "QLoRA",
}


def _numerics(policies: Policies) -> tuple[object, ...]:
    optimizer = policies.optimizer
    return policies.adapter, policies.quantisation, optimizer.name, optimizer.master


@dataclass(frozen=True)
class Options:
    """The choices for each policy; the first of each list is the plain one.

    Attributes:
        job: whose batch is divided.
        own: the way that the job's keys say.
        others: the ways that it could allow, those first that change least.
    """

    job: Job
    own: Way
    others: tuple[Way, ...]
    losses: tuple[LossPolicy, ...]
    checkpointing: tuple[CheckpointingPolicy, ...]
    shardings: tuple[ShardingPolicy, ...]

    @property
    def allowed(self) -> tuple[Way, ...]:
        """The ways that the planner may take where nothing fits in those before."""
        return tuple(way for way in self.others if {*way.allow} <= {*self.job.allow})

    @property
    def not_allowed(self) -> tuple[Way, ...]:
        """The ways that the user may be told of."""
        return tuple(way for way in self.others if not {*way.allow} <= {*self.job.allow})

    def plain(self) -> Policies:
        """No technique that was not asked for: the nearest to it that the engine can do."""
        nearest = next(self.candidates())
        return next(filter(possible, self.candidates()), nearest)

    def leanest(self, way: Way | None = None) -> list[Policies]:
        """The smallest batch with every technique that is open, for each placement, each loss that
        saves and the divisions of ranks that may save most: which does is a matter of the model."""
        losses = [loss for loss in self.losses if loss.kind is not LossKind.FULL] or self.losses
        shardings = set(leanest(self._shardings()))
        return [
            policies
            for policies in self.candidates(way)
            if policies.sharding in shardings
            and policies.batch == self.batches(policies.sharding)[-1]
            and policies.checkpointing == self.checkpointing[-1]
            and policies.loss in losses
        ]

    def way_of(self, policies: Policies) -> Way:
        """The way that `policies` go."""
        return next(way for way in (self.own, *self.others) if way.has(policies))

    def open_fraction(self, policies: Policies) -> str | None:
        """The field of the placement that says how much leaves and is the planner's to lower."""
        return self.way_of(policies).placement.open_fraction(policies.placement)

    def candidates(self, way: Way | None = None) -> Iterator[Policies]:
        """Every combination, of the job's own way if none is given. What leaves, leaves whole where
        its fraction is open."""
        way = way or self.own
        for sharding in self._shardings():
            for batch, loss, checkpointing, placement in product(
                self.batches(sharding),
                self.losses,
                self.checkpointing,
                way.placement.all,
            ):
                yield replace(
                    way.fixed,
                    batch=batch,
                    loss=loss,
                    checkpointing=checkpointing,
                    placement=placement,
                    sharding=sharding,
                )

    def batches(self, sharding: ShardingPolicy) -> tuple[BatchPolicy, ...]:
        """The ways to cut a rank's sequences, the largest micro-batch first; none where the ranks
        do not divide the global batch as the job says."""
        job = self.job
        total, rest = divmod(job.global_batch_size, sharding.data_parallel)
        if rest:
            return ()
        micro, steps = job.per_device_train_batch_size, job.gradient_accumulation_steps
        return tuple(
            BatchPolicy(size, total // size)
            for size in reversed(divisors(total))
            if micro in ("auto", size) and steps in ("auto", total // size)
        )

    def _shardings(self) -> tuple[ShardingPolicy, ...]:
        return tuple(sharding for sharding in self.shardings if self.batches(sharding))


def options_of(
    job: Job,
    *,
    precision: str,
    chunked_loss: bool,
    attention: str = "sdpa",
    on_card: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Options:
    """The choices that `job` leaves open.

    Args:
        precision: what `precision: auto` means on this device.
        chunked_loss: whether the model supports it.
        attention: what `attention: auto` means for this model.
        on_card: whether the device is a card.
        config: of the model, for how its layers can be divided.

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
    loss = LossPolicy(label_smoothing=job.label_smoothing_factor, z_loss=job.z_loss)
    losses = {str(kind): replace(loss, kind=kind) for kind in LossKind}
    shardings = shardings_of(job, config)
    kernel = AttentionKernel(attention if job.attention == "auto" else job.attention)
    fixed = Policies(
        precision=PrecisionPolicy(precision),
        optimizer=_optimizer(job),
        adapter=_adapter(job) if job.finetuning_type == "lora" else None,
        quantisation=_quantisation(job),
        attention=AttentionPolicy(kernel),
        sharding=shardings[0],
    )
    return Options(
        job=job,
        own=_way(job, (), fixed, on_card=on_card),
        others=tuple(_other_ways(job, fixed, on_card=on_card)),
        losses=_open(job.loss, losses) if chunked_loss else (losses["full"],),
        checkpointing=_checkpointing(job),
        shardings=shardings,
    )


def _way(job: Job, allow: tuple[str, ...], fixed: Policies, *, on_card: bool) -> Way:
    placement = placement_choices(
        job,
        on_card=on_card,
        trains_parameters=fixed.adapter is None,
        together=fixed.optimizer.split_master,
    )
    return Way(allow, fixed, placement)


_EIGHT_BITS = {
    OptimizerName.ADAMW: OptimizerName.ADAMW_8BIT,
    OptimizerName.LION: OptimizerName.LION_8BIT,
}
_QLORA_BITS = 4


def _other_ways(job: Job, fixed: Policies, *, on_card: bool) -> Iterator[Way]:
    """What the job could allow, what changes least first."""
    for allow, policies in (*_other_optimizers(job, fixed), *_adapters(job, fixed)):
        yield _way(job, allow, policies, on_card=on_card)


def _other_optimizers(job: Job, fixed: Policies) -> Iterator[tuple[tuple[str, ...], Policies]]:
    """States in fewer bytes, where all parameters are trained: a split master rounds otherwise,
    moments of 8 bits are approximate."""
    optimizer = fixed.optimizer
    if fixed.adapter is not None:
        return
    splits = fixed.precision.parameters == "bf16" and job.optim_master == "auto"
    eight = _EIGHT_BITS.get(optimizer.name)
    split = replace(optimizer, master=Master.SPLIT)
    if splits:
        yield ("split-master",), replace(fixed, optimizer=split)
    if eight is not None:
        yield ("8bit-optimizer",), replace(fixed, optimizer=replace(optimizer, name=eight))
    if splits and eight is not None:
        both = replace(split, name=eight)
        yield ("split-master", "8bit-optimizer"), replace(fixed, optimizer=both)
    if splits and optimizer.name is OptimizerName.ADAMW:
        compact = replace(optimizer, name=OptimizerName.ADAMW_COMPACT, master=Master.SPLIT_8)
        yield ("compact-optimizer",), replace(fixed, optimizer=compact)


def _adapters(job: Job, fixed: Policies) -> Iterator[tuple[tuple[str, ...], Policies]]:
    if job.resize_vocab and not job.additional_target:
        return  # rows of new tokens would be frozen
    lora = with_adapter(fixed, _adapter(job))
    if fixed.adapter is None:
        yield ("lora",), lora
    if fixed.quantisation is None:
        yield ("qlora",), replace(lora, quantisation=QuantisationPolicy(_QLORA_BITS))


def _check_master(job: Job, precision: str) -> None:
    """A split master is for parameters in bf16, whoever chose their precision.

    Raises:
        ConfigError: they are not.
    """
    if job.optim_master in SPLIT_MASTERS and precision != "bf16":
        raise ConfigError(
            f"optim_master: {job.optim_master} keeps the bits that bf16 parameters lack, and "
            f"precision: {job.precision} is {precision} here; set precision: bf16, or "
            "optim_master: fp32"
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
        config=config,
    )


def with_adapter(policies: Policies, adapter: AdapterPolicy) -> Policies:
    """`policies` with `adapter`, whose parameters are fp32 and have no master to split."""
    optimizer = replace(policies.optimizer, master=Master.FP32)
    return replace(policies, adapter=adapter, optimizer=optimizer)


def without_technique(policies: Policies) -> Iterator[tuple[str, Policies]]:
    """`policies` with one of its techniques taken away, by the name of that technique."""
    batch = policies.batch
    if batch.accumulation_steps > 1:
        whole = BatchPolicy(batch.sequences_per_rank, 1)
        yield "accumulation", replace(policies, batch=whole)
    if policies.loss.kind is not LossKind.FULL:
        yield (
            f"{policies.loss.kind} loss",
            replace(policies, loss=replace(policies.loss, kind=LossKind.FULL)),
        )
    if policies.checkpointing.enabled:
        name = "gradient" if policies.checkpointing.every == 1 else "selective"
        yield f"{name} checkpointing", replace(policies, checkpointing=CheckpointingPolicy())
    if policies.sharding.zero_stage:
        plain = replace(policies.sharding, zero_stage=0, replicas=1)
        yield f"ZeRO-{policies.sharding.zero_stage}", replace(policies, sharding=plain)
    if policies.sharding.stage_layers:
        uncut = replace(policies.sharding, stage_layers=())
        yield _stage_layers(policies), replace(policies, sharding=uncut)
    yield from without_placement(policies)
    if policies.adapter is not None and policies.quantisation is None:
        yield "LoRA", _without_adapter(policies)


def _stage_layers(policies: Policies) -> str:
    """Layers beside what a stage has at a time of each of them."""
    said = f"layers {layers_of_runs(policies.sharding)} on stages"
    times = ", ".join(map(str, in_flight(policies)))
    if policies.sharding.virtual_stages > 1:
        return f"{said} through whose runs {times} forwards are in flight"
    return f"{said} that keep {times} micro-batches"


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
    choices = {
        "false": CheckpointingPolicy(False),
        "selective": CheckpointingPolicy(True, every=2),
        "true": CheckpointingPolicy(True),
    }
    return _open(job.gradient_checkpointing, choices)


def _quantisation(job: Job) -> QuantisationPolicy | None:
    return None if job.quantization_bit is None else QuantisationPolicy(job.quantization_bit)


def _optimizer(job: Job) -> OptimizerPolicy:
    return OptimizerPolicy(
        name=OptimizerName(job.optim),
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        betas=(job.adam_beta1, job.adam_beta2),
        epsilon=job.adam_epsilon,
        max_grad_norm=job.max_grad_norm,
        loss_scale=LossScalePolicy(
            job.loss_scale,
            job.initial_scale_power,
            job.loss_scale_window,
            job.hysteresis,
            job.min_loss_scale,
        ),
        master=Master.FP32 if job.optim_master == "auto" else Master(job.optim_master),
    )


def _adapter(job: Job) -> AdapterPolicy:
    return AdapterPolicy(
        rank=job.lora_rank,
        alpha=2.0 * job.lora_rank if job.lora_alpha is None else job.lora_alpha,
        dropout=job.lora_dropout,
        targets=() if job.lora_target == "all" else _names(job.lora_target),
        rslora=job.use_rslora,
        dora=job.use_dora,
        modules_to_save=_names(job.additional_target or ""),
    )


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
