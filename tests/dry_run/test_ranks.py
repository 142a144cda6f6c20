"""A process group of one that passes for many."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

from tightfit.dry_run.ranks import Chunks, fake_ranks


def test_one_process_is_the_first_of_many() -> None:
    with fake_ranks(8):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 8)
        gathered = torch.empty(8 * 3)
        dist.all_gather_single(gathered, torch.ones(3))
    assert not dist.is_initialized()


def test_errors_are_shown_as_before() -> None:
    shown = sys.excepthook
    with fake_ranks(2):
        assert sys.excepthook is shown
    assert sys.excepthook is shown


def test_one_rank_needs_no_group() -> None:
    with fake_ranks(1):
        assert not dist.is_initialized()


def test_an_error_leaves_no_group_behind() -> None:
    with pytest.raises(ValueError, match="inside"), fake_ranks(2):
        raise ValueError("inside")
    assert not dist.is_initialized()


def test_a_real_group_is_left_alone(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="start a process for it"), fake_ranks(2):
            pass
        with fake_ranks(1):
            assert dist.get_backend() == "gloo"
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1))
def test_a_part_is_what_fsdp_cuts(size: int, ranks: int, dim: int) -> None:
    tensor = torch.arange(3 * size).view(size, 3) if dim == 0 else torch.ones(3, size)
    whole = _fsdp_common._chunk_with_empty(tensor, ranks, dim)
    own = Chunks(tensor, ranks, dim)
    for rank, part in enumerate(whole):
        assert torch.equal(own[rank], part)
        shares = own[rank].untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert shares is (part.numel() > 0)


def test_fsdp_cuts_itself_again_afterwards() -> None:
    with fake_ranks(2):
        assert _fsdp_param._chunk_with_empty is Chunks
    assert _fsdp_param._chunk_with_empty is _fsdp_common._chunk_with_empty
