"""The `tightfit` bill's closed forms of model states: what the engine keeps on one rank.

Parameters, gradients, master weights and optimizer states by tier and kind, and the whole
parameters and gradients that stand beside shards. Sharding is FSDP2's, one group per layer and one
for the rest, so stages 1 and 2 keep a shard beside the whole: `textbook` has what papers print.
Frozen parameters have no gradients and no states. Activations have no closed form here: the dry
run counts them, and the buffers that things travel through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from tightfit.bill.on_disk import SLOTS, record_bytes, whole_blocks
from tightfit.bill.optimizers import FP32_BYTES, counter_bytes, moment_bytes, moment_widths
from tightfit.bill.placed import Placed, PlacedGroup, placed_groups
from tightfit.bill.quantised import quantised_shapes
from tightfit.bill.shards import Group, ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.bill.whole import keeps_whole_gradients, keeps_whole_parameters
from tightfit.policies import Master, OptimizerName, Policies, QuantisationPolicy, Tier

StateBytes = Mapping[Tier, Mapping[Kind, int]]
INT8_BITS = 8
RESIDENT_LAYERS = 2  # the one that computes and the one that is gathered meanwhile


_REMAINDER_BYTES = {Master.SPLIT: 2, Master.SPLIT_8: 1}


@dataclass(frozen=True)
class Widths:
    """Bytes per value of trainable (also of their gradients), frozen and master parameters."""

    trainable: int
    frozen: int
    master: int


def state_widths(policies: Policies) -> Widths:
    """Bytes per value under `policies`, of what is placed as they say.

    A gradient has its parameter's type; adapters are fp32 on a base of any type, as peft makes
    them. A master exists where the update cannot run on the parameter itself: it is 16 bits wide,
    or on the device while the update runs elsewhere.

    Args:
        policies: precision, placement, optimizer and adapter are read.
    """
    base = policies.precision.parameter_bytes
    trainable = base if policies.adapter is None else FP32_BYTES
    placement = policies.placement
    on_device = placement.parameters is Tier.DEVICE
    elsewhere = on_device and placement.optimizer_states is not Tier.DEVICE
    master = _master_width(policies.optimizer.master, trainable, elsewhere=elsewhere)
    return Widths(trainable, base, master)


def _master_width(master: Master, trainable: int, *, elsewhere: bool) -> int:
    if trainable == FP32_BYTES:
        return FP32_BYTES if elsewhere else 0
    return _REMAINDER_BYTES.get(master, FP32_BYTES)


def model_state_bytes(
    trainable: int,
    frozen: int,
    policies: Policies,
    *,
    quantised: int = 0,
) -> StateBytes:
    """Bytes by tier and kind on one rank, from counts alone: a lower bound.

    On one rank it is exact but for what needs shapes: step counters, the padding of shards and of
    a disk's blocks, layers that are gathered or fetched, and Adafactor's states, which go by rows
    and columns, and 8-bit remainders, of which vectors have 16 bits. On nvme it has what a step
    reads and writes, which lies there twice. Of a pipeline it is an
    average stage, whatever layers each one has.

    Args:
        trainable: number of parameters that get gradients.
        frozen: number of parameters that do not, kept in the job's precision.
        policies: precision, placement, sharding, optimizer, quantisation and adapter are read;
            fractions are not, as counts have no layers: all is placed alike.
        quantised: number of frozen parameters stored in few bits.
    """
    stages, chunks = policies.sharding.pipeline_parallel, policies.sharding.virtual_stages
    model = ModelTensors.flat(trainable, frozen, quantised, layers=stages * chunks)
    shapes = _Shapes(policies, resident_layers=0, momentum=False, exact=False)
    table = shapes.stage_bytes(model.stage(0, stages, chunks))
    if policies.optimizer.name is OptimizerName.ADAFACTOR:
        table.get(policies.placement.optimizer_states, {}).pop(Kind.OPTIMIZER_STATES, None)
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
    momentum: bool = False,
    resident_layers: int = RESIDENT_LAYERS,
) -> StateBytes:
    """Bytes by tier and kind on the fullest rank, with every gradient present.

    Parameters that live elsewhere are on the device as well, as many as can be there at once;
    gradients that add up on the device while their states are elsewhere are there and on the host.

    Args:
        model: shapes of all parameters.
        policies: as in `model_state_bytes`, fractions included.
        momentum: whether SGD has one; the engine's has none.
        resident_layers: layers whose whole parameters are on the device at a time, where ranks
            share them.

    The fullest rank is the first one of the pipeline stage that takes most on the device.
    """
    sharding = policies.sharding
    stages, chunks = sharding.pipeline_parallel, sharding.virtual_stages
    shapes = _Shapes(policies, resident_layers, momentum, exact=True)
    tables = [
        shapes.stage_bytes(model.stage(number, stages, chunks, sharding.stage_layers))
        for number in range(stages)
    ]
    return max(tables, key=lambda table: sum(table[Tier.DEVICE].values()))


class _Table(defaultdict[Tier, dict[Kind, int]]):
    """Bytes by tier and kind that add up."""

    def add(self, tier: Tier, kind: Kind, count_bytes: int) -> None:
        """So much more of a kind on a tier."""
        self[tier][kind] = self[tier].get(kind, 0) + count_bytes


@dataclass(frozen=True)
class _Shapes:
    """Turns shapes into bytes under fixed choices; `exact` with all that needs shapes."""

    policies: Policies
    resident_layers: int
    momentum: bool
    exact: bool

    def stage_bytes(self, stage: ModelTensors) -> dict[Tier, dict[Kind, int]]:
        """Bytes by tier and kind of one pipeline stage's rank."""
        local = stage.divided(self.policies.sharding.tensor_parallel)
        groups = placed_groups(local, self.policies, sharded=self._shards > 1)
        table = _Table(dict)
        for placed in chain.from_iterable(groups):
            table.add(placed.values, Kind.PARAMETERS, self._kept_bytes(placed))
            if placed.tensor.trainable:
                own = replace(placed, tensor=placed.tensor.sharded(self._shards))
                self._add_gradients(table, own)
                self._add_states(table, own)
        if self.exact:
            visiting = self._visiting_bytes(groups, again=local.tied or self._shards > 1)
            table.add(Tier.DEVICE, Kind.PARAMETERS, visiting)
        if keeps_whole_gradients(self.policies):
            table[Tier.DEVICE][Kind.GRADIENTS] = self._gradient_bytes(local)
        table.add(Tier.DEVICE, Kind.COLLECTIVES, self._whole_bytes(local))
        return {tier: {k: n for k, n in kinds.items() if n} for tier, kinds in table.items()}

    def _kept_bytes(self, placed: Placed) -> int:
        """A parameter where it lives; on a disk a trained one lies twice."""
        tensor = placed.tensor
        if placed.values is not Tier.NVME or not self.exact:
            return self._parameter_bytes([tensor])
        slots = SLOTS if tensor.trainable else 1
        return slots * tensor.count * whole_blocks(self._shard_bytes(tensor))

    def _add_gradients(self, table: _Table, own: Placed) -> None:
        """They end where the update runs, or on its way to a disk on the host."""
        where = self.policies.placement.gradients
        if own.states is Tier.DEVICE:
            where = Tier.DEVICE
        elif where is Tier.DEVICE:
            table.add(Tier.HOST, Kind.GRADIENTS, self._gradient_bytes([own.tensor]))
        size_bytes = self._gradient_bytes([own.tensor])
        if where is Tier.NVME and self.exact:
            size_bytes = own.tensor.count * whole_blocks(size_bytes // own.tensor.count)
        table.add(where, Kind.GRADIENTS, size_bytes)

    def _add_states(self, table: _Table, own: Placed) -> None:
        """Master, moments and counter; counters of states on a disk are on the host."""
        tensor, count = own.tensor, own.tensor.count
        elsewhere = own.states is not Tier.DEVICE and own.values is Tier.DEVICE
        width = self._master_width(tensor, elsewhere=elsewhere)
        masters = width * tensor.elements
        moments = moment_bytes(tensor.shape, self.policies.optimizer.name, momentum=self.momentum)
        slots, counters = 1, own.states
        if self.exact and own.states is Tier.NVME:
            slots, counters = SLOTS, Tier.HOST
            moments = self._record_bytes(tensor, width) - masters
        table.add(own.states, Kind.MASTER_WEIGHTS, slots * count * masters)
        table.add(own.states, Kind.OPTIMIZER_STATES, slots * count * moments)
        if self.exact:
            counter = counter_bytes(self.policies.optimizer.name)
            table.add(counters, Kind.OPTIMIZER_STATES, count * counter)

    def _master_width(self, tensor: Tensor, *, elsewhere: bool) -> int:
        """Of a vector no half of a remainder is kept."""
        master = self.policies.optimizer.master
        if self.exact and master is Master.SPLIT_8 and len(tensor.shape) < 2:
            master = Master.SPLIT
        return _master_width(master, self._widths.trainable, elsewhere=elsewhere)

    def _record_bytes(self, tensor: Tensor, master_width: int) -> int:
        """All states of a tensor as they lie on a disk, in one slot."""
        name, values = self.policies.optimizer.name, tensor.elements
        if name is OptimizerName.ADAFACTOR:
            return whole_blocks(moment_bytes(tensor.shape, name)) + whole_blocks(
                master_width * values
            )
        widths, scales = moment_widths(values, name)
        return record_bytes(values, (*widths, master_width), scales=scales)

    def _visiting_bytes(self, groups: list[PlacedGroup], *, again: bool) -> int:
        """Most that is on the device of what lives elsewhere: neighbouring groups.

        Args:
            again: whether the first group comes once more at the end.
        """
        sizes = [
            sum(self._parameter_bytes([p.tensor]) for p in group if p.values is not Tier.DEVICE)
            for group in (*groups, *groups[: int(again)])
        ]
        count = 1 + self.policies.placement.prefetch
        return max(sum(sizes[start : start + count]) for start in range(len(sizes)))

    @property
    def _shards(self) -> int:
        return self.policies.sharding.shards

    @property
    def _widths(self) -> Widths:
        return state_widths(self.policies)

    def _parameter_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of shards, each as long as the first one. One shard is the whole."""
        return sum(tensor.count * self._shard_bytes(tensor) for tensor in tensors)

    def _shard_bytes(self, tensor: Tensor) -> int:
        if not tensor.quantised:
            width = self._widths.trainable if tensor.trainable else self._widths.frozen
            return width * tensor.sharded(self._shards).elements
        policy = self.policies.quantisation or QuantisationPolicy()
        if self.policies.sharding.tensor_parallel > 1:
            policy = replace(policy, double=False)  # parts would cut through groups of scales
        int8 = policy.bits == INT8_BITS
        parts = int8_shapes(tensor.shape) if int8 else quantised_shapes(tensor.shape, policy)
        return sum(Tensor(part).sharded(self._shards).elements for part in parts)

    def _gradient_bytes(self, tensors: Iterable[Tensor]) -> int:
        return self._widths.trainable * _trainable_elements(tensors)

    def _whole_bytes(self, local: ModelTensors) -> int:
        """Whole parameters beside the kept ones, and whole gradients on their way into shards.

        The root group is whole from the start of forward to the end of backward: it is FSDP's
        first and last. Copies within a collective are the dry run's to count.
        """
        total = 0
        if keeps_whole_parameters(self.policies):
            total += self._gathered_bytes(local)
        elif self._shards > 1:
            total += _passing_bytes(local, self._gathered_bytes, self.resident_layers)
        if self._shards > 1 and not keeps_whole_gradients(self.policies):
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
