"""Safetensors files that the ranks of a run write together, each its own part of every tensor.

A file holds whole tensors, laid out before anything is written, so that a rank writes what it has
where it belongs; no more than one part is in memory. The format: eight bytes with the length of a
JSON header, the header, then the tensors' bytes (https://huggingface.co/docs/safetensors). Knows
nothing of what is in them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.engine.regions import Region, boxes_of
from tightfit.engine.slab import memory_of
from tightfit.errors import InputError
from tightfit.ledger import local_part

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
_ALIGN = 8  # of the header's end, for readers that map the file
_METADATA = {"format": "pt"}  # whose tensors they are: transformers asks


@dataclass(frozen=True)
class Entry:
    """A whole tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """What one rank writes of a tensor.

    Attributes:
        name: of the tensor.
        region: of it that `values` is.
        values: of the region's shape, on any device.
    """

    name: str
    region: Region
    values: torch.Tensor


def lay_out(path: Path, entries: Sequence[Entry]) -> None:
    """Make a file with room for all entries.

    Raises:
        OSError: there is no room.
    """
    header = _header(entries)
    size = len(header) + sum(entry.bytes for entry in entries)
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)


class TensorWriter:
    """Files that were laid out, open for writing; a context manager.

    Args:
        entries: of each file, by its path, as they were laid out.
    """

    def __init__(self, entries: Mapping[Path, Sequence[Entry]]) -> None:
        self._paths = list(entries)
        self._descriptors: list[int] = []
        self._places: dict[str, tuple[int, int, Entry]] = {}
        for index, its_own in enumerate(entries.values()):
            offset = len(_header(its_own))
            for entry in its_own:
                self._places[entry.name] = (index, offset, entry)
                offset += entry.bytes

    def __enter__(self) -> TensorWriter:
        self._descriptors = [os.open(path, os.O_WRONLY) for path in self._paths]
        return self

    def __exit__(self, *unused: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def write(self, parts: Iterable[Part]) -> None:
        """Write parts; one is asked for when the one before is written.

        When one cannot be written the others are still asked for: ranks may make them together.

        Raises:
            OSError: one could not be written.
        """
        failed: OSError | None = None
        for part in parts:
            try:
                if failed is None:
                    self._write_part(part)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        for descriptor in self._descriptors:
            os.fsync(descriptor)

    def _write_part(self, part: Part) -> None:
        index, offset, entry = self._places[part.name]
        assert part.values.dtype is entry.dtype, part.name
        on_host = part.values.detach().contiguous().cpu()
        assert on_host.shape == tuple(s.stop - s.start for s in part.region), part.name
        if on_host.numel():
            memory = memory_of(on_host)
            for begin, place, count in _runs(entry, part.region):
                piece = memory[begin : begin + count]
                _write(self._descriptors[index], piece, offset + place)


class TensorReader:
    """Named tensors in safetensors files, of which regions are read.

    Tensors are read from the mapped file, whose pages processes share.

    Raises:
        InputError: a file is broken.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path} is broken: {error}; get it again") from None
            for name in file.keys():  # noqa: SIM118
                self._file_of[name] = file

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """The values of a region, or all: pages of the mapped file, which no ledger counts."""
        file = self._file_of[name]
        with _disable_current_modes():
            found: torch.Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        return found

    def read_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a rank holds of the tensor of that name, as it holds its part of `tensor`."""
        boxes = boxes_of(tensor)
        if len(boxes) == 1:
            return self.read(name, boxes[0].of_whole)
        values = torch.empty(local_part(tensor).shape, dtype=self.read(name).dtype)
        for box in boxes:
            values[box.of_part] = self.read(name, box.of_whole)
        return values


def _runs(entry: Entry, region: Region) -> Iterator[tuple[int, int, int]]:
    """Where the bytes of a region lie in a row: begin in the region, in the tensor, and count."""
    sizes = [part.stop - part.start for part in region]
    # The dimensions behind `cut` are there whole, so that each run goes over all of them.
    cut = len(sizes) - 1
    while cut > 0 and sizes[cut] == entry.shape[cut]:
        cut -= 1
    width = entry.dtype.itemsize
    strides = [math.prod(entry.shape[i + 1 :]) * width for i in range(len(sizes))]
    count = math.prod(sizes[max(cut, 0) :]) * width
    first = sum(part.start * stride for part, stride in zip(region, strides, strict=True))
    for number, index in enumerate(product(*(range(size) for size in sizes[: max(cut, 0)]))):
        place = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield number * count, place, count


def _write(descriptor: int, piece: memoryview, offset: int) -> None:
    while len(piece):
        written = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[written:], offset + written


def _header(entries: Sequence[Entry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": _METADATA}
    begin = 0
    for entry in entries:
        end = begin + entry.bytes
        fields[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % _ALIGN)
    return len(header).to_bytes(8, "little") + header
