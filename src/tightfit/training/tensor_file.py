"""A safetensors file written tensor by tensor, so that no more than one has to be in memory.

The library's own writer wants all tensors at once. The format: eight bytes with the length of a
JSON header, the header, then the tensors' bytes in its order
(https://huggingface.co/docs/safetensors). Knows nothing of what is in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tightfit.engine.slab import memory_of

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int64: "I64",
}
_ALIGN = 8  # of the header's end, for readers that map the file

Entry = tuple[str, torch.dtype, Sequence[int]]


def write_tensors(path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write a file of named tensors.

    Args:
        entries: name, type and shape of each.
        tensors: in the same order, on any device; one is asked for when the one before is written.

    Raises:
        OSError: it could not be written.
    """
    header = _header(entries)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for (name, dtype, shape), tensor in zip(entries, tensors, strict=True):
            assert tensor.dtype is dtype, name
            assert tuple(tensor.shape) == tuple(shape), name
            on_host = tensor.detach().contiguous().cpu()
            if on_host.numel():
                file.write(memory_of(on_host))


def _header(entries: Sequence[Entry]) -> bytes:
    fields, begin = {}, 0
    for name, dtype, shape in entries:
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        fields[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(fields).encode()
    return header + b" " * (-len(header) % _ALIGN)
