"""Predicted seconds that a rank's device computes in one optimizer step, all micro-batches of it.

Matrix products over their rate, but no less than reading the matrices takes; and what is read and
written beside them over the memory's rate: what layers leave, logits, gradients that are summed,
bases that are unpacked. Knows nothing of what goes on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.bill.quantised import quantised_bytes
from tightfit.bill.stages import layout_of
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import ModelSizes
from tightfit.planner.rates import Rates
from tightfit.planner.traffic import Traffic
from tightfit.policies import LossKind, Policies, Tier

_FP32_BYTES = 4
# Bytes that element-wise operations move for each byte they leave as an activation: written once
# and read once in forward, read with a gradient of its size and a gradient written in backward.
_MOVES_IN_FORWARD = 2
_MOVES_IN_BACKWARD = 3
# Times that a logit is read or written in fp32 beside its products, in place: the highest, the
# difference to it, the exponential, the sum, the quotient and its gradient (`engine/loss.py`); a
# full loss has about as many, of tensors that it makes.
_MOVES_OF_LOGITS = 9
# The same of a value of the output layer's gradient in fp32: added to, scaled.
_MOVES_OF_HEAD_GRADIENT = 4
MOVES_OF_A_SUM = 3  # two are read, one is written


@dataclass(frozen=True)
class ModelCost:
    """What the time model needs to know of a model.

    Attributes:
        parameters: of the whole model.
        trainable: parameters with gradients.
        matmul_parameters: parameters that multiply every token (all but embedding look-ups).
        layers, hidden_size: of the decoder.
        head_parameters: of the output layer, which is not recomputed.
        activation_bytes_per_token: what the layers of a plain forward leave for backward.
        sizes: what decides what ranks send each other.
    """

    parameters: int
    trainable: int
    matmul_parameters: int
    head_parameters: int
    layers: int
    hidden_size: int
    activation_bytes_per_token: float
    sizes: ModelSizes


@dataclass(frozen=True)
class Computing:
    """Seconds."""

    forward: float
    backward: float
    recompute: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.recompute


def computing_of(
    cost: ModelCost,
    policies: Policies,
    workload: Workload,
    rates: Rates,
    traffic: Traffic,
    *,
    on_card: bool,
) -> Computing:
    """What a step's forward, backward and recomputing take.

    Args:
        traffic: what moves meanwhile.
        on_card: whether the device is none of the host's processors.
    """
    products = _Products(cost, policies, workload, rates)
    moved = _Moved(cost, policies, products.tokens, rates, traffic, on_card=on_card)
    again = 1 / policies.checkpointing.every if policies.checkpointing.enabled else 0.0
    recompute = products.layers + moved.left_by_layers * _MOVES_IN_FORWARD + moved.unpacked
    # Backward is two products per product, one where the weight is frozen.
    times = 2 if policies.adapter is None else 1
    return Computing(
        products.forward + moved.left_by_layers * _MOVES_IN_FORWARD + moved.logits + moved.unpacked,
        times * products.forward
        + moved.left_by_layers * _MOVES_IN_BACKWARD
        + moved.gradients
        + moved.unpacked,
        again * recompute + products.logits_again,
    )


class _Products:
    """Seconds of a rank's matrix products in one step.

    Attributes:
        tokens: that it multiplies.
        forward: of all of them.
        layers: of those of the layers.
        logits_again: of the output layer's, where a loss in slices makes its logits once more.
    """

    def __init__(
        self, cost: ModelCost, policies: Policies, workload: Workload, rates: Rates
    ) -> None:
        sharding = policies.sharding
        # Ranks have an equal part each, by sequences or by matrices; of stages the fullest counts.
        tokens = workload.average_tokens_per_step / sharding.ranks * _fullest(cost, policies)
        attention = 2 * 2 * cost.layers * cost.hidden_size * workload.sequence_length / 2
        shares = sharding.tensor_parallel * sharding.pipeline_parallel
        matrices = cost.matmul_parameters / shares * policies.precision.parameter_bytes
        least = policies.batch.accumulation_steps * matrices / rates.memory_bytes_per_second
        rate = rates.matmul_flops_per_second

        def seconds(operations: float) -> float:
            """Of products that read every matrix once in each micro-batch."""
            return max(tokens * operations / rate, least)

        in_layers = 2 * (cost.matmul_parameters - cost.head_parameters) + attention
        sliced = policies.loss.kind is LossKind.SLICED
        self.tokens = tokens
        self.forward = seconds(2 * cost.matmul_parameters + attention)
        self.layers = seconds(in_layers)
        self.logits_again = tokens * 2 * cost.head_parameters / rate if sliced else 0.0


class _Moved:
    """Seconds of what is read and written beside products in one step.

    Attributes:
        left_by_layers: of each time that what layers leave is read or written.
        logits: of the loss.
        gradients: of making and summing those of parameters.
        unpacked: of one pass through a packed base in all micro-batches.
    """

    def __init__(
        self,
        cost: ModelCost,
        policies: Policies,
        tokens: float,
        rates: Rates,
        traffic: Traffic,
        *,
        on_card: bool,
    ) -> None:
        sharding, micro_batches = policies.sharding, policies.batch.accumulation_steps
        parts = sharding.tensor_parallel * sharding.pipeline_parallel
        in_place = rates.in_place_bytes_per_second(on_card=on_card)
        made = rates.memory_bytes_per_second
        new = rates.new_bytes_per_second(on_card=on_card)
        logits = tokens * cost.sizes.vocab_size * _FP32_BYTES
        unpacked = _unpacked_bytes(cost.sizes, policies) / parts
        self.left_by_layers = tokens * cost.activation_bytes_per_token / made
        self.logits = logits / new + _MOVES_OF_LOGITS * logits / in_place
        self.gradients = (
            _made_bytes(cost, policies) / parts / new
            + _summed_bytes(cost, policies, traffic) / parts / in_place
        )
        self.unpacked = micro_batches * unpacked / made


def _made_bytes(cost: ModelCost, policies: Policies) -> float:
    """Of gradients in new memory: once in a step, and those of the vocabulary's matrices whole in
    each micro-batch."""
    width = _gradient_width(policies)
    if policies.adapter is not None:
        return cost.trainable * width
    ends = width + (0 if policies.loss.kind is LossKind.FULL else _FP32_BYTES)
    return cost.trainable * width + policies.batch.accumulation_steps * cost.head_parameters * ends


def _summed_bytes(cost: ModelCost, policies: Policies, traffic: Traffic) -> float:
    """Read and written on the device where gradients become sums: those of the micro-batches, and
    in each of them those of the vocabulary's matrices."""
    sharding, micro_batches = policies.sharding, policies.batch.accumulation_steps
    width = _gradient_width(policies)
    leave = policies.placement.gradients is not Tier.DEVICE
    staying = cost.trainable - traffic.updated_off * sharding.updaters * leave
    shards = sharding.shards if sharding.zero_stage > 1 else 1  # scattered before the sum
    summed = MOVES_OF_A_SUM * staying / shards * width * (micro_batches - 1)
    if policies.adapter is not None:
        return summed
    full = policies.loss.kind is LossKind.FULL
    head = 0 if full else _MOVES_OF_HEAD_GRADIENT * _FP32_BYTES
    embedding = MOVES_OF_A_SUM * width if cost.sizes.tied else 0
    return summed + micro_batches * cost.head_parameters * (head + embedding)


def _gradient_width(policies: Policies) -> int:
    """Bytes of a gradient's number; adapters are fp32."""
    return _FP32_BYTES if policies.adapter is not None else policies.precision.parameter_bytes


def _unpacked_bytes(sizes: ModelSizes, policies: Policies) -> float:
    """Read and written to make a packed base's weights in the computing type, once through it."""
    if policies.quantisation is None:
        return 0.0
    packed = quantised_bytes((sizes.quantised,), policies.quantisation)
    return packed + sizes.quantised * policies.precision.parameter_bytes


def _fullest(cost: ModelCost, policies: Policies) -> float:
    """How much more the fullest stage computes than an average one."""
    stages = policies.sharding.pipeline_parallel
    if stages == 1:
        return 1.0
    inside = (cost.matmul_parameters - cost.head_parameters) // cost.layers
    sizes = stages, policies.sharding.virtual_stages, policies.sharding.stage_layers
    runs = layout_of(cost.layers, inside, cost.head_parameters, *sizes)
    weights = [inside * sum(map(len, runs[number::stages])) for number in range(stages)]
    weights[-1] += cost.head_parameters
    return stages * max(weights) / cost.matmul_parameters
