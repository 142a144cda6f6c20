"""Which rank is whose neighbour."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.mesh import Dimension, Mesh
from tightfit.errors import ConfigError
from tightfit.policies import ShardingPolicy

CPU = torch.device("cpu")
ALL = ShardingPolicy(16, 3, tensor_parallel=2, pipeline_parallel=2, replicas=2)
Place = tuple[int, ...]


def place_of(rank: int, policy: ShardingPolicy) -> tuple[Place, list[Place], tuple[int, int]]:
    """A rank's number along each dimension, its neighbours along each of them, its data rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=policy.ranks)
    try:
        mesh = Mesh(policy, CPU)
        numbers = tuple(mesh.rank(dimension) for dimension in Dimension)
        groups = [
            tuple(dist.get_process_group_ranks(mesh.group(dimension)))
            for dimension in Dimension
            if mesh.size(dimension) > 1
        ]
        return numbers, groups, (mesh.data_rank, mesh.data_ranks)
    finally:
        dist.destroy_process_group()


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    numbers, groups, data = place_of(13, ALL)
    assert numbers == (1, 1, 0, 1)  # 13 = 8 + 4 + 0 + 1
    assert groups == [(5, 13), (9, 13), (13, 15), (12, 13)]
    assert data == (2, 4)


def test_every_rank_has_a_place_of_its_own() -> None:
    places = [place_of(rank, ALL) for rank in range(16)]
    assert len({numbers for numbers, _, _ in places}) == 16
    data = [data for _, _, data in places]
    assert data == [(number, 4) for number in (0, 0, 1, 1, 2, 2, 3, 3) * 2], "tensor ranks share it"


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (ShardingPolicy(), (1, 1, 1, 1)),
        (ShardingPolicy(4, 0), (1, 4, 1, 1)),  # each has all of it
        (ShardingPolicy(4, 1), (1, 1, 4, 1)),
        (ShardingPolicy(8, 3, replicas=2), (1, 2, 4, 1)),
        (ShardingPolicy(8, 2, tensor_parallel=8), (1, 1, 1, 8)),
    ],
)
def test_sizes_are_those_of_the_policy(policy: ShardingPolicy, sizes: tuple[int, ...]) -> None:
    with fake_ranks(policy.ranks), fake_tensors():
        mesh = Mesh(policy, CPU)
        assert tuple(mesh.size(dimension) for dimension in Dimension) == sizes
        assert mesh.data_ranks == policy.data_parallel


def test_a_mesh_in_a_dry_run_has_real_numbers() -> None:
    with fake_ranks(16), fake_tensors():
        mesh = Mesh(ALL, CPU)
        part = mesh.part(Dimension.SHARD, Dimension.TENSOR)
        assert (part.shape, part.get_coordinate()) == ((2, 2), (0, 0))
        assert dist.get_process_group_ranks(part.get_group("shard")) == [0, 2]


def test_as_many_ranks_as_planned() -> None:
    with pytest.raises(ConfigError, match="for 2 ranks, and this is a process group of 1"):
        Mesh(ShardingPolicy(2, 3), CPU)
    with fake_ranks(3), pytest.raises(ConfigError, match="process group of 3"):
        Mesh(ShardingPolicy(2, 3), CPU)
    with fake_ranks(3):  # one of many may train for itself
        assert Mesh(ShardingPolicy(), CPU).data_ranks == 1
