"""Files that are written in parts, in any order, are what the safetensors library reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tightfit.engine.regions import whole
from tightfit.errors import InputError
from tightfit.training.tensor_file import (
    Entry,
    Part,
    TensorReader,
    TensorWriter,
    _runs,
    lay_out,
)

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16, torch.int64)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def write(path: Path, parts: list[Part], entries: list[Entry]) -> None:
    lay_out(path, entries)
    with TensorWriter({path: entries}) as writer:
        writer.write(parts)


def entry(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name, tensor.dtype, tuple(tensor.shape))


@given(
    specs=st.dictionaries(
        st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(TYPES), SHAPES), max_size=6
    ),
    cuts=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_what_is_written_in_parts_is_what_the_library_reads(
    specs: dict[str, tuple[torch.dtype, list[int]]],
    cuts: list[int],
    order: object,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = {
        name: torch.randint(0, 100, shape).to(dtype) for name, (dtype, shape) in specs.items()
    }
    parts = [part for name, tensor in tensors.items() for part in cut(name, tensor, cuts)]
    order.shuffle(parts)  # type: ignore[attr-defined]
    path = tmp_path_factory.mktemp("tensors") / "file.safetensors"
    write(path, parts, [entry(name, tensor) for name, tensor in tensors.items()])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype
        assert torch.equal(read[name], tensor)


def cut(name: str, tensor: torch.Tensor, cuts: list[int]) -> Iterator[Part]:
    """The tensor in two along each of its dimensions, some of them empty."""
    regions: list[tuple[slice, ...]] = [()]
    for size, at in zip(tensor.shape, cuts, strict=False):
        pieces = (slice(0, min(at, size)), slice(min(at, size), size))
        regions = [(*region, piece) for region in regions for piece in pieces]
    for region in regions:
        yield Part(name, region, tensor[region])


@pytest.mark.parametrize(
    ("region", "runs"),
    [
        ((slice(0, 4), slice(0, 6)), 1),
        ((slice(1, 3), slice(0, 6)), 1),
        ((slice(0, 4), slice(2, 4)), 4),
        ((slice(2, 2), slice(0, 6)), 1),
    ],
)
def test_rows_are_written_at_once(region: tuple[slice, ...], runs: int) -> None:
    assert len(list(_runs(Entry("a", torch.float32, (4, 6)), region))) == runs


def test_a_tensor_is_asked_for_when_the_one_before_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    entries = [Entry(str(i), torch.float32, (2**10,)) for i in range(3)]
    lay_out(path, entries)

    def parts() -> Iterator[Part]:
        for i in range(3):
            if i:
                assert (TensorReader([path]).read(str(i - 1)) == i).all()
            values = torch.full((2**10,), i + 1.0)
            yield Part(str(i), whole(values), values)

    with TensorWriter({path: entries}) as writer:
        writer.write(parts())


def test_a_writer_that_is_cut_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: really(fd, data[:7], at))
    tensor = torch.arange(12.0).view(3, 4)
    path = tmp_path / "file.safetensors"
    write(path, [Part("a", whole(tensor), tensor)], [entry("a", tensor)])
    assert torch.equal(load_file(path)["a"], tensor)


def test_after_a_failure_the_parts_that_are_left_are_still_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks wait in the making of each."""
    entries = [Entry(str(i), torch.float32, (4,)) for i in range(3)]
    path = tmp_path / "file.safetensors"
    lay_out(path, entries)
    made, asked = [], []

    def full(fd: int, data: memoryview, at: int) -> int:
        asked.append(at)
        raise OSError("full")

    def parts() -> Iterator[Part]:
        for i in range(3):
            made.append(i)
            yield Part(str(i), whole(torch.ones(4)), torch.ones(4))

    monkeypatch.setattr(os, "pwrite", full)
    with TensorWriter({path: entries}) as writer, pytest.raises(OSError, match="full"):
        writer.write(parts())
    assert made == [0, 1, 2]
    assert len(asked) == 1


def test_no_room_is_known_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left|too large"):
        lay_out(tmp_path / "file.safetensors", [Entry("a", torch.float32, (2**50,))])


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    tensor = torch.arange(6.0)
    write(path, [Part("a", whole(tensor), tensor)], [entry("a", tensor)])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"file\.safetensors is broken"):
        TensorReader([path])
