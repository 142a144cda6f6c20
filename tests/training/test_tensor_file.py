"""Files written tensor by tensor, read by the safetensors library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tightfit.training.tensor_file import write_tensors

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16, torch.int64)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(
    specs=st.dictionaries(
        st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(TYPES), SHAPES), max_size=6
    )
)
def test_what_is_written_is_what_the_library_reads(
    specs: dict[str, tuple[torch.dtype, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = {
        name: torch.randint(0, 100, shape).to(dtype) for name, (dtype, shape) in specs.items()
    }
    path = tmp_path_factory.mktemp("tensors") / "file.safetensors"
    write_tensors(path, [(n, t.dtype, t.shape) for n, t in tensors.items()], tensors.values())
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_tensor_is_asked_for_when_the_one_before_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    sizes: list[int] = []

    def tensors() -> Iterator[torch.Tensor]:
        for _ in range(3):
            sizes.append(path.stat().st_size)
            yield torch.zeros(2**20)

    write_tensors(path, [(str(i), torch.float32, (2**20,)) for i in range(3)], tensors())
    assert sizes[2] - sizes[1] >= 2**22 > sizes[0]


def test_strided_tensors_are_written_in_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    write_tensors(tmp_path / "file.safetensors", [("a", tensor.dtype, tensor.shape)], [tensor])
    assert torch.equal(load_file(tmp_path / "file.safetensors")["a"], tensor)
