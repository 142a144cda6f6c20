"""Which part of a whole tensor a rank holds, as one box of rows and columns.

Whatever shares a tensor out (FSDP2 by rows, tensor parallel by rows or columns, both), a rank's
part is a region of it, so that files hold whole tensors and every rank reads and writes its own.
Knows nothing of files.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Region = tuple[slice, ...]


def whole(tensor: torch.Tensor) -> Region:
    """The region of all of it."""
    return tuple(slice(0, size) for size in tensor.shape)


def region_of(tensor: torch.Tensor) -> Region:
    """Where this rank's part lies in `tensor`; an empty region where it holds nothing."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
