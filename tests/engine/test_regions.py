"""A rank's boxes, put together over all ranks, are the whole tensor, each value once."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine import regions
from tightfit.engine.mesh import Dimension
from tightfit.engine.regions import boxes_of, is_whole, part_of, whole

SHARDS, TENSORS = 2, 3
WHOLE = torch.arange(13 * 12.0).view(13, 12)
ROWS, COLUMNS = Shard(0), Shard(1)


def part(tensor: torch.Tensor, ranks: int, rank: int, dim: int) -> torch.Tensor:
    chunks = list(tensor.chunk(ranks, dim))
    nothing = tensor.narrow(dim, 0, 0)
    return [*chunks, *[nothing] * (ranks - len(chunks))][rank]


def placed(
    mesh: DeviceMesh, shard: Placement, tensor: Placement, rank: tuple[int, int]
) -> torch.Tensor:
    """What a rank of the grid holds: first the tensor group divides, then shards are made."""
    held = WHOLE
    if isinstance(tensor, Shard | _StridedShard):
        pieces = getattr(tensor, "split_factor", 1)
        own = [
            part(piece, TENSORS, rank[1], tensor.dim) for piece in held.chunk(pieces, tensor.dim)
        ]
        held = torch.cat(own, tensor.dim)
    if isinstance(shard, Shard | _StridedShard):
        held = part(held, SHARDS, rank[0], shard.dim)
    return DTensor.from_local(
        held, mesh, [shard, tensor], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )


@pytest.mark.parametrize(
    ("shard", "tensor"),
    [
        (ROWS, Replicate()),
        (Replicate(), ROWS),
        (Replicate(), COLUMNS),
        (ROWS, COLUMNS),
        (_StridedShard(0, split_factor=TENSORS), ROWS),
        (ROWS, _StridedShard(1, split_factor=2)),
        (Replicate(), Replicate()),
    ],
)
def test_all_ranks_boxes_are_the_whole(
    shard: Placement, tensor: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = torch.full_like(WHOLE, torch.nan)
    for number in range(SHARDS * TENSORS):
        rank = divmod(number, TENSORS)
        with fake_ranks(SHARDS * TENSORS):
            names = (str(Dimension.SHARD), str(Dimension.TENSOR))
            mesh = init_device_mesh("cpu", (SHARDS, TENSORS), mesh_dim_names=names)
            monkeypatch.setattr(regions, "place_in", lambda mesh, at=rank: list(at))
            held = placed(mesh, shard, tensor, rank)
            assert isinstance(held, DTensor)
            for box in boxes_of(held):
                values = held._local_tensor[box.of_part]
                assert torch.equal(values, WHOLE[box.of_whole])
                seen[box.of_whole] = values
            assert torch.equal(part_of(WHOLE, held), held._local_tensor)
            assert is_whole(held) == (shard.is_replicate() and tensor.is_replicate())
    assert torch.equal(seen, WHOLE)


def test_several_weights_kept_in_one_are_several_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(TENSORS):
        mesh = init_device_mesh("cpu", (TENSORS,), mesh_dim_names=(str(Dimension.TENSOR),))
        local = torch.cat([WHOLE[:12].T[:2].T, WHOLE[:12].T[6:8].T], 1)
        held = DTensor.from_local(
            local,
            mesh,
            [_StridedShard(1, split_factor=2)],
            run_check=False,
            shape=torch.Size([12, 12]),
            stride=(12, 1),
        )
        boxes = boxes_of(held)
    assert [box.of_whole[1] for box in boxes] == [slice(0, 2), slice(6, 8)]
    assert [box.of_part[1] for box in boxes] == [slice(0, 2), slice(2, 4)]


def test_other_tensors_are_whole() -> None:
    (box,) = boxes_of(WHOLE)
    assert box.of_whole == box.of_part == whole(WHOLE)
    assert boxes_of(torch.tensor(1.0))[0].of_whole == ()
    assert is_whole(WHOLE)
