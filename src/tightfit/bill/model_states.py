"""The `tightfit` bill's closed forms of model states: what the engine keeps on one rank.

Parameters, gradients, master weights and optimizer states by tier and kind, and the whole
parameters and gradients that stand beside shards. Sharding is FSDP2's, one group per layer and one
for the rest, so stages 1 and 2 keep a shard beside the whole: `textbook` has what papers print.
Frozen parameters have no gradients and no states. Activations have no closed form here: the dry
run counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from tightfit.bill.optimizers import FP32_BYTES, counter_bytes, moment_bytes
from tightfit.bill.quantised import quantised_shapes
from tightfit.bill.shards import Group, ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.policies import OptimizerName, Policies, QuantisationPolicy, Tier

StateBytes = Mapping[Tier, Mapping[Kind, int]]
INT8_BITS = 8
RESIDENT_LAYERS = 2  # the one that computes and the one that is fetched meanwhile


class Master(StrEnum):
    """How an optimizer keeps 32 bits of a parameter that it cannot update itself."""

    FP32 = "fp32"  # a copy, 4 bytes
    SPLIT = "split"  # the 16 bits that the parameter lacks, 2 bytes; needs a 16-bit parameter
    NONE = "none"  # nothing: the update rounds to the parameter's own type


@dataclass(frozen=True)
class Widths:
    """Bytes per value of trainable (also of their gradients), frozen and master parameters."""

    trainable: int
    frozen: int
    master: int


def state_widths(policies: Policies, master: Master = Master.FP32) -> Widths:
    """Bytes per value under `policies`.

    A gradient has its parameter's type; adapters are fp32 on a base of any type, as peft makes
    them. A master exists where the update cannot run on the parameter itself: it is 16 bits wide,
    or on the device while the update runs elsewhere.
    """
    base = policies.precision.parameter_bytes
    trainable = base if policies.adapter is None else FP32_BYTES
    placement = policies.placement
    on_device = placement.parameters is Tier.DEVICE
    elsewhere = on_device and placement.optimizer_states is not Tier.DEVICE
    needed = trainable < FP32_BYTES or elsewhere
    if not needed or master is Master.NONE:
        return Widths(trainable, base, 0)
    split = master is Master.SPLIT and trainable < FP32_BYTES
    return Widths(trainable, base, FP32_BYTES - trainable if split else FP32_BYTES)


def model_state_bytes(
    trainable: int,
    frozen: int,
    policies: Policies,
    *,
    quantised: int = 0,
    master: Master = Master.FP32,
) -> StateBytes:
    """Bytes by tier and kind on one rank, from counts alone: a lower bound, exact on one rank.

    Args:
        trainable: number of parameters that get gradients.
        frozen: number of parameters that do not, kept in the job's precision.
        policies: precision, placement, sharding, optimizer, quantisation and adapter are read.
        quantised: number of frozen parameters stored in few bits.
        master: how masters are kept.

    Without shapes there is no padding, no step counter and no gather of single layers, and
    Adafactor's states, which go by rows and columns, are left out.
    """
    model = ModelTensors.flat(
        trainable, frozen, quantised, layers=policies.sharding.pipeline_parallel
    )
    shapes = _Shapes(policies, master, resident_layers=0, momentum=False, counters=False)
    table = shapes.stage_bytes(model.stage(0, policies.sharding.pipeline_parallel))
    if policies.optimizer.name is OptimizerName.ADAFACTOR:
        table[policies.placement.optimizer_states][Kind.OPTIMIZER_STATES] = 0
    return table


def int8_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the byte tensors of an 8-bit weight [..., inputs]: values, and an fp32 per row.

    The layout of LLM.int8() (https://arxiv.org/abs/2208.07339).
    """
    return shape, (prod(shape[:-1]), FP32_BYTES)


def tensor_state_bytes(
    model: ModelTensors,
    policies: Policies,
    *,
    master: Master = Master.FP32,
    momentum: bool = False,
    resident_layers: int = RESIDENT_LAYERS,
) -> StateBytes:
    """Bytes by tier and kind on the fullest rank, with every gradient present.

    Args:
        model: shapes of all parameters.
        policies: as in `model_state_bytes`.
        master: how masters are kept.
        momentum: whether SGD has one.
        resident_layers: layers whose whole parameters are on the device at a time, where the
            device does not keep all of them.

    The fullest rank is the first one of the pipeline stage that takes most on the device.
    """
    stages = policies.sharding.pipeline_parallel
    shapes = _Shapes(policies, master, resident_layers, momentum, counters=True)
    tables = [shapes.stage_bytes(model.stage(number, stages)) for number in range(stages)]
    return max(tables, key=lambda table: sum(table[Tier.DEVICE].values()))


@dataclass(frozen=True)
class _Shapes:
    """Turns shapes into bytes under fixed choices."""

    policies: Policies
    master: Master
    resident_layers: int
    momentum: bool
    counters: bool

    def stage_bytes(self, stage: ModelTensors) -> dict[Tier, dict[Kind, int]]:
        """Bytes by tier and kind of one pipeline stage's rank."""
        local = stage.divided(self.policies.sharding.tensor_parallel)
        own = [tensor.sharded(self._shards) for tensor in local]
        placement = self.policies.placement
        table: dict[Tier, dict[Kind, int]] = defaultdict(dict)
        table[Tier.DEVICE] = {}
        table[placement.parameters][Kind.PARAMETERS] = self._parameter_bytes(local)
        table[placement.gradients][Kind.GRADIENTS] = self._gradient_bytes(own)
        table[placement.optimizer_states][Kind.OPTIMIZER_STATES] = self._moment_bytes(own)
        if masters := self._master_bytes(own):
            table[placement.optimizer_states][Kind.MASTER_WEIGHTS] = masters
        if _keeps_whole_gradients(self.policies):
            table[Tier.DEVICE][Kind.GRADIENTS] = self._gradient_bytes(local)
        if passing := self._whole_bytes(local):
            table[Tier.DEVICE][Kind.COLLECTIVES] = passing
        return table

    @property
    def _shards(self) -> int:
        return self.policies.sharding.data_parallel if _is_sharded(self.policies) else 1

    @property
    def _widths(self) -> Widths:
        return state_widths(self.policies, self.master)

    def _parameter_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of shards, each as long as the first one. One shard is the whole."""
        return sum(tensor.count * self._shard_bytes(tensor) for tensor in tensors)

    def _shard_bytes(self, tensor: Tensor) -> int:
        if not tensor.quantised:
            width = self._widths.trainable if tensor.trainable else self._widths.frozen
            return width * tensor.sharded(self._shards).elements
        policy = self.policies.quantisation or QuantisationPolicy()
        int8 = policy.bits == INT8_BITS
        parts = int8_shapes(tensor.shape) if int8 else quantised_shapes(tensor.shape, policy)
        return sum(Tensor(part).sharded(self._shards).elements for part in parts)

    def _gradient_bytes(self, tensors: Iterable[Tensor]) -> int:
        return self._widths.trainable * _trainable_elements(tensors)

    def _master_bytes(self, tensors: Iterable[Tensor]) -> int:
        return self._widths.master * _trainable_elements(tensors)

    def _moment_bytes(self, tensors: Iterable[Tensor]) -> int:
        name = self.policies.optimizer.name
        counter = counter_bytes(name) if self.counters else 0
        return sum(
            tensor.count * (moment_bytes(tensor.shape, name, momentum=self.momentum) + counter)
            for tensor in tensors
            if tensor.trainable
        )

    def _whole_bytes(self, local: ModelTensors) -> int:
        """Whole parameters beside the kept ones, and whole gradients on their way into shards.

        The root group is whole from the start of forward to the end of backward: it is FSDP's
        first and last. Copies within a collective are the dry run's to count.
        """
        total = 0
        if _keeps_whole_parameters(self.policies):
            total += self._gathered_bytes(local)
        elif self._shards > 1 or self.policies.placement.parameters is not Tier.DEVICE:
            total += _passing_bytes(local, self._gathered_bytes, self.resident_layers)
        if self._shards > 1 and not _keeps_whole_gradients(self.policies):
            # One layer's, as its reduction overlaps with the next one's backward.
            total += _passing_bytes(local, self._gradient_bytes, min(1, self.resident_layers))
        return total

    def _gathered_bytes(self, tensors: Iterable[Tensor]) -> int:
        """An all-gather's result is as long as all shards together, padding included."""
        return self._shards * self._parameter_bytes(tensors)


def _trainable_elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.total_elements for tensor in tensors if tensor.trainable)


def _passing_bytes(local: ModelTensors, size: Callable[[Group], int], layers: int) -> int:
    """The root group and the `layers` neighbouring layers that take most together."""
    sizes = [size(layer) for layer in local.layers]
    runs = [sum(sizes[start : start + layers]) for start in range(len(sizes))]
    return size(local.root) + max(runs, default=0)


def _is_sharded(policies: Policies) -> bool:
    return policies.sharding.zero_stage > 0 and policies.sharding.data_parallel > 1


def _keeps_whole_parameters(policies: Policies) -> bool:
    """Stages 1 and 2 keep them until backward has passed, a pipeline to the end of the step."""
    sharding = policies.sharding
    return _is_sharded(policies) and (sharding.zero_stage < 3 or sharding.pipeline_parallel > 1)


def _keeps_whole_gradients(policies: Policies) -> bool:
    """Stage 1 adds micro-batches up before it reduces; so does a pipeline at every stage."""
    sharding = policies.sharding
    adds_up = sharding.zero_stage == 1 and policies.batch.accumulation_steps > 1
    return _is_sharded(policies) and (adds_up or sharding.pipeline_parallel > 1)
