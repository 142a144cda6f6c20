"""What exchanges take over links inside machines and between them."""

from __future__ import annotations

import pytest

from tightfit.engine.mesh import Dimension
from tightfit.planner.collectives import Collective, Exchange
from tightfit.planner.links import exchange_seconds, link_between_ranks, waiting
from tightfit.planner.rates import Link, Rates
from tightfit.policies import ShardingPolicy

RATES = Rates(
    1e12, 1e11, 1e10, 1e11, 1e9, 1e9, 1e-6, link=Link.of(1e-5, 1e9), network=Link.of(1e-3, 1e8)
)
MIB = 2**20


def exchange(
    dimension: Dimension, ranks: int, kind: Collective, *, hidden: bool = False
) -> Exchange:
    return Exchange(dimension, kind, ranks, MIB, 3, hidden)


def test_inside_a_machine_it_is_latency_and_bytes_over_the_link() -> None:
    found = exchange(Dimension.SHARD, 4, Collective.ALL_GATHER)
    seconds = exchange_seconds(found, ShardingPolicy(4, 3), 1, RATES)
    assert seconds == pytest.approx(3 * (2 * 1e-5 + 3 / 4 * MIB / 1e9))


def test_a_ring_through_machines_is_as_fast_as_the_network() -> None:
    """Once out of each machine, whatever the number of its ranks."""
    found = exchange(Dimension.SHARD, 4, Collective.ALL_GATHER)
    seconds = exchange_seconds(found, ShardingPolicy(4, 3), 2, RATES)
    assert seconds == pytest.approx(3 * (1e-5 + 1e-3 + 3 / 4 * MIB / 1e8))


def test_groups_of_one_rank_on_each_machine_share_its_network() -> None:
    """Two replicas of two shards: both ranks of a machine sum with the other machine at once."""
    found = exchange(Dimension.REPLICATE, 2, Collective.ALL_REDUCE)
    seconds = exchange_seconds(found, ShardingPolicy(4, 3, replicas=2), 2, RATES)
    assert seconds == pytest.approx(3 * (1e-3 + 2 * (1 / 2) * MIB * 2 / 1e8))


def test_tensor_ranks_never_leave_their_machine() -> None:
    found = exchange(Dimension.TENSOR, 2, Collective.ALL_REDUCE)
    alone = exchange_seconds(found, ShardingPolicy(2, tensor_parallel=2), 1, RATES)
    among = exchange_seconds(found, ShardingPolicy(4, tensor_parallel=2), 2, RATES)
    assert among == pytest.approx(alone)


def test_a_link_that_nobody_knows_is_as_fast_as_copies() -> None:
    unknown = Rates(1e12, 1e11, 1e10, 1e11, 1e9, 1e9, 1e-6)
    assert link_between_ranks(unknown).all_reduce.bytes_per_second == 1e10


def test_what_can_be_hidden_is_counted_apart() -> None:
    kinds = [exchange(Dimension.SHARD, 2, Collective.ALL_GATHER, hidden=h) for h in (True, False)]
    found = waiting(kinds, ShardingPolicy(2, 3), 1, RATES)
    assert found.hidden == pytest.approx(found.exposed)
    assert found.exposed > 0
