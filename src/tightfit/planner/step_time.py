"""Predicted seconds of one optimizer step from counts and measured rates.

A step is a rank's matrix products over their rate, plus element-wise work over the memory's rate,
plus the update, plus a fixed cost per operation, plus what copies and disk take beyond what runs
meanwhile.
A card computes while copies and the host's update go on; on a CPU they take its own time, and only
the disk is waited for beside it. Layers are alike, so what is hidden of one is hidden of all. What
ranks send each other is taken to be as fast as copies between device and host: nobody measures
their link yet. Knows nothing of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.facts.workload import Workload
from tightfit.planner.collectives import ModelSizes, exchanges, sent_bytes
from tightfit.planner.plan import StepTime
from tightfit.planner.rates import Rates
from tightfit.planner.traffic import Traffic
from tightfit.policies import LossKind, Policies

_OPERATIONS_PER_LAYER = 120  # forward and backward of a decoder layer, counted by the ledger
# Bytes that element-wise operations move for each byte they leave as an activation: written once
# and read once in forward, read with a gradient of its size and a gradient written in backward.
_MOVES_IN_FORWARD = 2
_MOVES_IN_BACKWARD = 3


@dataclass(frozen=True)
class ModelCost:
    """What the time model needs to know of a model.

    Attributes:
        parameters: of the whole model.
        trainable: parameters with gradients.
        matmul_parameters: parameters that multiply every token (all but embedding look-ups).
        layers, hidden_size: of the decoder.
        head_parameters: of the output layer, which is not recomputed.
        activation_bytes_per_token: what a plain forward leaves for backward.
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
class _Computing:
    """Seconds of one step that the device computes, over all micro-batches."""

    forward: float
    backward: float
    recompute: float


def predict_step_time(
    cost: ModelCost,
    policies: Policies,
    workload: Workload,
    rates: Rates,
    traffic: Traffic,
    *,
    on_card: bool,
) -> StepTime:
    """Seconds of one optimizer step over the global batch.

    Args:
        traffic: what moves meanwhile.
        on_card: whether the device computes while the host copies and updates.
    """
    computing = _computing(cost, policies, workload, rates)
    copies = _copies(traffic, policies, rates, computing, on_card=on_card)
    disk = _disk_while_computing(traffic, rates, computing)
    update = _Update.of(cost, policies, rates, traffic)
    budget = computing.forward / policies.batch.accumulation_steps
    budget = budget if policies.placement.lazy_step else 0.0
    hides = budget if on_card else 0.0
    # The update of the host, the disk and the copy back are one pipeline, as long as the slowest
    # of them; of each only what exceeds those before it and the forward that runs meanwhile counts.
    exposed = update.first + max(0.0, update.rest - hides)
    busy = max(update.rest, hides) if on_card else update.rest + budget
    return StepTime(
        compute=computing.forward + computing.backward,
        recompute=computing.recompute,
        optimizer=update.on_device + update.norm + exposed,
        copies=copies
        + (max(0.0, update.copies - max(busy, update.disk)) if on_card else update.copies),
        overhead=_OPERATIONS_PER_LAYER
        * cost.layers
        * policies.batch.accumulation_steps
        * rates.operation_seconds,
        disk=disk + max(0.0, update.disk - busy),
        communication=_communication(cost, policies, workload, rates, computing, on_card=on_card),
    )


def _communication(
    cost: ModelCost,
    policies: Policies,
    workload: Workload,
    rates: Rates,
    computing: _Computing,
    *,
    on_card: bool,
) -> float:
    """What collectives take; on a card, of those that computing hides, what is beyond it."""
    found = exchanges(cost.sizes, policies, workload)
    behind = sent_bytes(e for e in found if e.hidden) / rates.copy_bytes_per_second
    waited = sent_bytes(e for e in found if not e.hidden) / rates.copy_bytes_per_second
    hides = computing.forward + computing.backward + computing.recompute if on_card else 0.0
    return waited + max(0.0, behind - hides)


def _computing(cost: ModelCost, policies: Policies, workload: Workload, rates: Rates) -> _Computing:
    # Ranks have an equal part of it each, by sequences, by matrices or by layers.
    tokens = workload.average_tokens_per_step / policies.sharding.ranks
    attention = 2 * 2 * cost.layers * cost.hidden_size * workload.sequence_length / 2
    forward = tokens * (2 * cost.matmul_parameters + attention)
    # Backward is two products per product, one where the weight is frozen.
    backward = forward * (2 if policies.adapter is None else 1)
    element_wise = tokens * cost.activation_bytes_per_token / rates.memory_bytes_per_second
    recomputed = tokens * (2 * (cost.matmul_parameters - cost.head_parameters) + attention)
    recompute = (
        recomputed / rates.matmul_flops_per_second + element_wise * _MOVES_IN_FORWARD
        if policies.checkpointing.enabled
        else 0.0
    )
    return _Computing(
        forward / rates.matmul_flops_per_second + element_wise * _MOVES_IN_FORWARD,
        backward / rates.matmul_flops_per_second + element_wise * _MOVES_IN_BACKWARD,
        recompute + _logits_again(cost, policies, tokens) / rates.matmul_flops_per_second,
    )


def _logits_again(cost: ModelCost, policies: Policies, tokens: float) -> float:
    """Operations of the output layer's product that a loss in slices makes once more."""
    sliced = policies.loss.kind is LossKind.SLICED
    return tokens * 2 * cost.head_parameters if sliced else 0.0


def _copies(
    traffic: Traffic, policies: Policies, rates: Rates, computing: _Computing, *, on_card: bool
) -> float:
    """What copies take beyond the computing of the forward or backward that they belong to.

    On a card both directions go at once. Without prefetch a layer waits for its parameters.
    """
    rate = rates.copy_bytes_per_second
    parameters, activations = traffic.parameters_in / rate, traffic.activations / rate
    gradients, late = traffic.gradients_out / rate, traffic.gradients_late / rate
    if not on_card:
        return 2 * parameters + 2 * activations + gradients + late
    waited = 0.0
    if not policies.placement.prefetch:
        waited, parameters = 2 * parameters, 0.0
    forward = max(0.0, max(parameters, activations) - computing.forward)
    behind = computing.backward + computing.recompute
    backward = max(0.0, max(parameters + activations, gradients) - behind)
    return waited + forward + backward + late


def _disk_while_computing(traffic: Traffic, rates: Rates, computing: _Computing) -> float:
    """What reading parameters and adding gradients up on disk take beyond computing."""
    parameters = traffic.disk_parameters / rates.disk_read_bytes_per_second
    gradients = traffic.disk_gradients / rates.disk_write_bytes_per_second
    behind = computing.backward + computing.recompute
    return max(0.0, parameters - computing.forward) + max(0.0, parameters + gradients - behind)


@dataclass(frozen=True)
class _Update:
    """Seconds of the optimizer's step, each as if it were alone.

    Attributes:
        norm: of the gradients, and clipping; nothing can go on meanwhile.
        on_device: update of what stays.
        first, rest: update of what leaves: of what forward begins with, and of all else.
        disk, copies: states read and written, values brought back.
    """

    norm: float
    on_device: float
    first: float
    rest: float
    disk: float
    copies: float

    @classmethod
    def of(cls, cost: ModelCost, policies: Policies, rates: Rates, traffic: Traffic) -> _Update:
        # The norm and the clipping read and write every gradient once more.
        touched = 3 * cost.trainable * policies.precision.parameter_bytes
        host = rates.host_optimizer_parameters_per_second
        sharding = policies.sharding
        shards = sharding.data_parallel if sharding.zero_stage else 1
        staying = (cost.trainable - traffic.updated_off) / shards
        return cls(
            norm=touched / rates.memory_bytes_per_second,
            on_device=staying / rates.device_optimizer_parameters_per_second,
            first=traffic.updated_first / host,
            rest=(traffic.updated_off - traffic.updated_first) / host,
            disk=traffic.disk_read / rates.disk_read_bytes_per_second
            + traffic.disk_written / rates.disk_write_bytes_per_second,
            copies=traffic.values_in / rates.copy_bytes_per_second,
        )
