"""Which part of a whole tensor a rank holds, as boxes of it.

Files hold whole tensors, and every rank reads and writes its own part of them. Whatever shares a
tensor out (FSDP2 by rows, tensor parallel by rows or columns, both, or each of several weights that
a layer keeps in one), that part is a few boxes; mostly one. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.engine.collectives import own_range
from tightfit.engine.mesh import Dimension
from tightfit.ledger import local_part

Region = tuple[slice, ...]
_Runs = list[tuple[int, int]]  # first and end of what is kept of one dimension, in order


@dataclass(frozen=True)
class Box:
    """Values that are together in the whole tensor and in the part."""

    of_whole: Region
    of_part: Region


def whole(tensor: torch.Tensor) -> Region:
    """The region of all of it."""
    return tuple(slice(0, size) for size in tensor.shape)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether this rank holds all of it, as then all ranks do."""
    return all(box.of_whole == whole(tensor) for box in boxes_of(tensor))


def boxes_of(tensor: torch.Tensor) -> list[Box]:
    """Where this rank's part lies in `tensor`, in order; boxes may be empty."""
    runs: list[_Runs] = [[(0, size)] for size in tensor.shape]
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        place = place_in(tensor.device_mesh)
        # Tensor-parallel ranks, who are innermost, share out first, and others what they have.
        for index, placement in reversed(list(enumerate(tensor.placements))):
            if isinstance(placement, Shard | _StridedShard):
                ranks, rank = tensor.device_mesh.size(index), place[index]
                pieces = 1
                if isinstance(placement, _StridedShard) and names[index] == Dimension.TENSOR:
                    pieces = int(placement.split_factor)
                cut = _pieces(runs[placement.dim], pieces)
                runs[placement.dim] = [run for piece in cut for run in _own(piece, ranks, rank)]
    boxes = []
    for chosen in product(*(_places(dimension) for dimension in runs)):
        boxes.append(Box(tuple(of for of, _ in chosen), tuple(in_part for _, in_part in chosen)))
    return boxes


def place_in(mesh: DeviceMesh) -> list[int]:
    """This rank's number along each dimension of a mesh.

    Not `get_coordinate`: torch keeps meshes that are equal, and gives tensors one that was made
    when this process, or the one that it was forked from, passed for another rank in a dry run.
    """
    with _disable_current_modes():
        found: list[int] = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
    return found


def part_of(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `values`, which are whole, as it holds its part of `tensor`."""
    boxes = boxes_of(tensor)
    if len(boxes) == 1:
        return values[boxes[0].of_whole]
    part = values.new_empty(local_part(tensor).shape)
    for box in boxes:
        part[box.of_part] = values[box.of_whole]
    return part


def _pieces(runs: _Runs, count: int) -> list[_Runs]:
    """A dimension that nobody has cut yet, in equal pieces."""
    if count == 1:
        return [runs]
    ((first, end),) = runs
    size = (end - first) // count
    return [[(first + i * size, first + (i + 1) * size)] for i in range(count)]


def _own(runs: _Runs, ranks: int, rank: int) -> _Runs:
    """One rank's share of what `runs` keep, laid end to end."""
    first, size = own_range(sum(end - begin for begin, end in runs), ranks, rank)
    kept: _Runs = []
    passed = 0
    for begin, end in runs:
        low = max(begin, begin + first - passed)
        high = min(end, begin + first + size - passed)
        if low < high:
            kept.append((low, high))
        passed += end - begin
    return kept or [(0, 0)]


def _places(runs: _Runs) -> list[tuple[slice, slice]]:
    """Each run in the whole and in the part."""
    places, passed = [], 0
    for begin, end in runs:
        places.append((slice(begin, end), slice(passed, passed + end - begin)))
        passed += end - begin
    return places
