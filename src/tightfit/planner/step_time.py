"""Predicted seconds of one optimizer step from counts and measured rates.

A step is matrix products over their rate, plus element-wise work over the memory's rate, plus the
update, plus copies, plus a fixed cost per operation. Nothing overlaps, as in the engine. Knows
nothing of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.facts.workload import Workload
from tightfit.planner.plan import StepTime
from tightfit.planner.rates import Rates
from tightfit.policies import Policies, Tier

_OPERATIONS_PER_LAYER = 120  # forward and backward of a decoder layer, counted by the ledger
# Bytes that element-wise operations move for each byte they leave as an activation: written once
# and read once in forward, read with a gradient of its size and a gradient written in backward.
_MOVES_PER_ACTIVATION_BYTE = 5


@dataclass(frozen=True)
class ModelCost:
    """What the time model needs to know of a model.

    Attributes:
        trainable: parameters with gradients.
        matmul_parameters: parameters that multiply every token (all but embedding look-ups).
        layers, hidden_size: of the decoder.
        head_parameters: of the output layer, which is not recomputed.
        activation_bytes_per_token: what a plain forward leaves for backward.
    """

    trainable: int
    matmul_parameters: int
    head_parameters: int
    layers: int
    hidden_size: int
    activation_bytes_per_token: float


def predict_step_time(
    cost: ModelCost, policies: Policies, workload: Workload, rates: Rates
) -> StepTime:
    """Seconds of one optimizer step over the global batch."""
    tokens = workload.average_tokens_per_step
    attention = 2 * 2 * cost.layers * cost.hidden_size * workload.sequence_length / 2
    forward = tokens * (2 * cost.matmul_parameters + attention)
    # Backward is two products per product, one where the weight is frozen.
    backward = forward * (2 if policies.adapter is None else 1)
    element_wise = tokens * cost.activation_bytes_per_token / rates.memory_bytes_per_second
    recomputed = tokens * (2 * (cost.matmul_parameters - cost.head_parameters) + attention)
    recompute = (
        recomputed / rates.matmul_flops_per_second + element_wise * 2
        if policies.checkpointing.enabled
        else 0.0
    )
    return StepTime(
        compute=(forward + backward) / rates.matmul_flops_per_second
        + element_wise * _MOVES_PER_ACTIVATION_BYTE,
        recompute=recompute,
        optimizer=_optimizer_seconds(cost, policies, rates),
        copies=_copied_bytes(cost, policies) / rates.copy_bytes_per_second,
        overhead=_OPERATIONS_PER_LAYER
        * cost.layers
        * policies.batch.accumulation_steps
        * rates.operation_seconds,
    )


def _optimizer_seconds(cost: ModelCost, policies: Policies, rates: Rates) -> float:
    rate = (
        rates.host_optimizer_parameters_per_second
        if policies.placement.optimizer_states is Tier.HOST
        else rates.device_optimizer_parameters_per_second
    )
    # The norm and the clipping read and write every gradient once more.
    norm = 3 * cost.trainable * policies.precision.parameter_bytes / rates.memory_bytes_per_second
    return cost.trainable / rate + norm


def _copied_bytes(cost: ModelCost, policies: Policies) -> int:
    """Gradients out once per micro-batch, parameters back once per step."""
    if policies.placement.optimizer_states is not Tier.HOST:
        return 0
    width = policies.precision.parameter_bytes
    return cost.trainable * width * (policies.batch.accumulation_steps + 1)
