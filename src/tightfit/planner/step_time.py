"""Predicted seconds of one optimizer step from counts and measured rates.

A step is what a rank computes (`computing.py`), plus the update, plus a fixed cost per operation,
plus what copies, ranks and disk take beyond what runs meanwhile, plus what stages stand idle.
A card computes while copies, collectives and the host's update go on, and while the next operations
are started; on a CPU they take its own time, and only the disk is waited for beside it. Layers are
alike, so what is hidden of one is hidden of all. Knows nothing of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.engine.mesh import Dimension
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import Collective, Exchange, exchanges
from tightfit.planner.computing import MOVES_OF_A_SUM, Computing, ModelCost, computing_of
from tightfit.planner.links import waiting
from tightfit.planner.plan import StepTime
from tightfit.planner.rates import Rates
from tightfit.planner.traffic import Traffic
from tightfit.policies import Policies

_OPERATIONS_PER_LAYER = 120  # forward and backward of a decoder layer, counted by the ledger


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
    computing = computing_of(cost, policies, workload, rates, traffic, on_card=on_card)
    copies = _copies(traffic, policies, rates, computing, on_card=on_card)
    disk = _disk_while_computing(traffic, rates, computing)
    update = _Update.of(cost, policies, rates, traffic, on_card=on_card)
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
    cost: ModelCost, policies: Policies, rates: Rates, computing: Computing, *, on_card: bool
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
    computing: Computing,
    *,
    machines: int,
    on_card: bool,
) -> float:
    """What collectives take; on a card, of those that computing hides, what is beyond it."""
    found = exchanges(cost.sizes, policies, workload)
    waits = waiting(found, policies.sharding, machines, rates)
    packed = sum(map(_packed_bytes, found)) / rates.memory_bytes_per_second
    return packed + waits.exposed + max(0.0, waits.hidden - (computing.total if on_card else 0.0))


def _packed_bytes(exchange: Exchange) -> float:
    """Read and written where FSDP2 copies parameters out of the buffer that they are gathered in,
    and gradients into the one that is scattered: computing waits for both."""
    if exchange.dimension is not Dimension.SHARD or exchange.kind is Collective.ALL_REDUCE:
        return 0.0
    return 2 * exchange.bytes_each * exchange.count


def _bubble(policies: Policies, computing: Computing) -> float:
    """What stages of a pipeline stand idle while it fills and empties: as long as (stages - 1) of
    the micro-batches compute, interleaved a part of that (https://arxiv.org/abs/2104.04473, 2.2).
    """
    sharding, batches = policies.sharding, policies.batch.accumulation_steps
    runs = batches * sharding.virtual_stages
    return computing.total * (sharding.pipeline_parallel - 1) / runs


def _copies(
    traffic: Traffic, policies: Policies, rates: Rates, computing: Computing, *, on_card: bool
) -> float:
    """What copies take beyond the computing of the forward or backward that they belong to.

    On a card both directions go at once, and without prefetch a layer waits for its parameters; on
    a CPU what comes to the device is made anew there.
    """
    rate = rates.copy_bytes_per_second
    parameters, activations = traffic.parameters_in / rate, traffic.activations / rate
    added = MOVES_OF_A_SUM * traffic.gradients_added / rates.host_memory_bytes_per_second
    gradients, late = traffic.gradients_out / rate + added, traffic.gradients_late / rate
    if not on_card:
        new = (2 * traffic.parameters_in + traffic.activations) / rates.new_bytes_per_second(
            on_card=False
        )
        return new + activations + gradients + late
    waited = 0.0
    if not policies.placement.prefetch:
        waited, parameters = 2 * parameters, 0.0
    forward = max(0.0, max(parameters, activations) - computing.forward)
    behind = computing.backward + computing.recompute
    backward = max(0.0, max(parameters + activations, gradients) - behind)
    return waited + forward + backward + late


def _disk_while_computing(traffic: Traffic, rates: Rates, computing: Computing) -> float:
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
    def of(
        cls,
        cost: ModelCost,
        policies: Policies,
        rates: Rates,
        traffic: Traffic,
        *,
        on_card: bool,
    ) -> _Update:
        """Each part; see the attributes."""
        # The norm and the clipping read and write every gradient once more.
        own = cost.trainable / policies.sharding.updaters
        touched = 3 * own * policies.precision.parameter_bytes
        host = rates.host_optimizer_parameters_per_second
        staying = own - traffic.updated_off
        return cls(
            norm=touched / rates.in_place_bytes_per_second(on_card=on_card),
            on_device=staying / rates.device_optimizer_parameters_per_second,
            first=traffic.updated_first / host,
            rest=(traffic.updated_off - traffic.updated_first) / host,
            disk=traffic.disk_read / rates.disk_read_bytes_per_second
            + traffic.disk_written / rates.disk_write_bytes_per_second,
            copies=traffic.values_in / rates.copy_bytes_per_second,
        )
