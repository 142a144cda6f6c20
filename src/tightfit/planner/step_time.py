"""Predicted seconds of one optimizer step from counts and measured rates.

A step is a rank's matrix products over their rate, but no less than reading the matrices takes,
plus element-wise work over the memory's rate, plus the update, plus a fixed cost per operation,
plus what copies, ranks and disk take beyond what runs meanwhile, plus what stages stand idle.
A card computes while copies, collectives and the host's update go on, and while the next operations
are started; on a CPU they take its own time, and only the disk is waited for beside it. Layers are
alike, so what is hidden of one is hidden of all. Knows nothing of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.bill.stages import layout_of
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import ModelSizes, exchanges
from tightfit.planner.links import waiting
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

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.recompute


def predict_step_time(
    cost: ModelCost,
    policies: Policies,
    workload: Workload,
    rates: Rates,
    traffic: Traffic,
    *,
    machines: int = 1,
    on_card: bool,
) -> StepTime:
    """Seconds of one optimizer step over the global batch.

    Args:
        traffic: what moves meanwhile.
        machines: that the ranks are on.
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
        overhead=_overhead(cost, policies, rates, computing, on_card=on_card),
        disk=disk + max(0.0, update.disk - busy),
        communication=_communication(
            cost, policies, workload, rates, computing, machines=machines, on_card=on_card
        ),
        bubble=_bubble(policies, computing),
    )


def _overhead(
    cost: ModelCost, policies: Policies, rates: Rates, computing: _Computing, *, on_card: bool
) -> float:
    """What starting operations takes; a card has them started while it computes."""
    layers = cost.layers / policies.sharding.pipeline_parallel
    started = _OPERATIONS_PER_LAYER * layers * policies.batch.accumulation_steps
    seconds = started * rates.operation_seconds
    return max(0.0, seconds - computing.total) if on_card else seconds


def _communication(
    cost: ModelCost,
    policies: Policies,
    workload: Workload,
    rates: Rates,
    computing: _Computing,
    *,
    machines: int,
    on_card: bool,
) -> float:
    """What collectives take; on a card, of those that computing hides, what is beyond it."""
    found = exchanges(cost.sizes, policies, workload)
    waits = waiting(found, policies.sharding, machines, rates)
    return waits.exposed + max(0.0, waits.hidden - (computing.total if on_card else 0.0))


def _bubble(policies: Policies, computing: _Computing) -> float:
    """What stages of a pipeline stand idle while it fills and empties: as long as (stages - 1) of
    the micro-batches compute, interleaved a part of that (https://arxiv.org/abs/2104.04473, 2.2).
    """
    sharding, batches = policies.sharding, policies.batch.accumulation_steps
    runs = batches * sharding.virtual_stages
    return computing.total * (sharding.pipeline_parallel - 1) / runs


def _computing(cost: ModelCost, policies: Policies, workload: Workload, rates: Rates) -> _Computing:
    sharding = policies.sharding
    # Ranks have an equal part each, by sequences or by matrices; of stages the fullest counts.
    tokens = workload.average_tokens_per_step / sharding.ranks * _fullest(cost, policies)
    attention = 2 * 2 * cost.layers * cost.hidden_size * workload.sequence_length / 2
    products = 2 * cost.matmul_parameters + attention
    recomputed = 2 * (cost.matmul_parameters - cost.head_parameters) + attention
    shares = sharding.tensor_parallel * sharding.pipeline_parallel
    matrices = cost.matmul_parameters / shares * policies.precision.parameter_bytes
    least = policies.batch.accumulation_steps * matrices / rates.memory_bytes_per_second

    def seconds(operations: float) -> float:
        """Of products that read every matrix once in each micro-batch."""
        return max(operations / rates.matmul_flops_per_second, least)

    element_wise = tokens * cost.activation_bytes_per_token / rates.memory_bytes_per_second
    again = seconds(tokens * recomputed) + element_wise * _MOVES_IN_FORWARD
    again *= (1 / policies.checkpointing.every) if policies.checkpointing.enabled else 0.0
    # Backward is two products per product, one where the weight is frozen.
    times = 2 if policies.adapter is None else 1
    return _Computing(
        seconds(tokens * products) + element_wise * _MOVES_IN_FORWARD,
        times * seconds(tokens * products) + element_wise * _MOVES_IN_BACKWARD,
        again + _logits_again(cost, policies, tokens) / rates.matmul_flops_per_second,
    )


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
        own = cost.trainable / policies.sharding.updaters
        touched = 3 * own * policies.precision.parameter_bytes
        host = rates.host_optimizer_parameters_per_second
        staying = own - traffic.updated_off
        return cls(
            norm=touched / rates.memory_bytes_per_second,
            on_device=staying / rates.device_optimizer_parameters_per_second,
            first=traffic.updated_first / host,
            rest=(traffic.updated_off - traffic.updated_first) / host,
            disk=traffic.disk_read / rates.disk_read_bytes_per_second
            + traffic.disk_written / rates.disk_write_bytes_per_second,
            copies=traffic.values_in / rates.copy_bytes_per_second,
        )
