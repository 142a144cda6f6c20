"""What exchanges between ranks take over the links that they pass.

All groups of ranks exchange at once. What passes inside a machine goes over links of its ranks'
own; what passes between machines goes through one network, which all groups of a machine share. A
ring of ranks is as fast as its slowest link, and begins with as many hops as a tree over its ranks
has levels. Knows neither models nor memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tightfit.planner.collectives import Collective, Exchange, ranks_together
from tightfit.planner.rates import Collective as Timing
from tightfit.planner.rates import Link, Rates
from tightfit.policies import ShardingPolicy


@dataclass(frozen=True)
class Waiting:
    """Seconds of one step.

    Attributes:
        exposed: in exchanges that the next operation needs.
        hidden: in those that a device can compute beside.
    """

    exposed: float
    hidden: float


def waiting(
    found: Iterable[Exchange], sharding: ShardingPolicy, machines: int, rates: Rates
) -> Waiting:
    """What all exchanges of a step take.

    Args:
        machines: that the ranks are on, as many on each, numbered machine by machine.
    """
    seconds = [
        (exchange.hidden, exchange_seconds(exchange, sharding, machines, rates))
        for exchange in found
    ]
    return Waiting(
        exposed=sum(time for hidden, time in seconds if not hidden),
        hidden=sum(time for hidden, time in seconds if hidden),
    )


def exchange_seconds(
    exchange: Exchange, sharding: ShardingPolicy, machines: int, rates: Rates
) -> float:
    """What one exchange takes in a step, all its calls together."""
    here = sharding.ranks / machines
    together = ranks_together(exchange, sharding, machines)
    each = exchange.sent_bytes / exchange.count
    latency, transfer = 0.0, 0.0
    if together > 1:
        inside = _timing(link_between_ranks(rates), exchange.kind)
        latency += _levels(together) * inside.latency_seconds
        transfer = each / inside.bytes_per_second
    if together < exchange.ranks:
        network = _timing(rates.network or link_between_ranks(rates), exchange.kind)
        latency += _levels(exchange.ranks / together) * network.latency_seconds
        transfer = max(transfer, each * here / together / network.bytes_per_second)
    return exchange.count * (latency + transfer)


def link_between_ranks(rates: Rates) -> Link:
    """Of one machine; where nobody has measured it, as fast as copies between device and host."""
    return rates.link or Link.of(rates.operation_seconds, rates.copy_bytes_per_second)


def _timing(link: Link, kind: Collective) -> Timing:
    """One rank sends to another as fast as a ring's link."""
    return {
        Collective.ALL_GATHER: link.all_gather,
        Collective.REDUCE_SCATTER: link.reduce_scatter,
        Collective.ALL_REDUCE: link.all_reduce,
        Collective.SEND: link.all_gather,
    }[kind]


def _levels(ranks: float) -> int:
    return max(1, math.ceil(math.log2(ranks)))
