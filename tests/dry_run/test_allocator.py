"""The replay against the allocator's documented behaviour, and its invariants under any trace."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.dry_run.allocator import BLOCK_BYTES, CachingAllocator
from tightfit.dry_run.fakes import fake_tensors
from tightfit.ledger import Ledger
from tightfit.policies import Tier
from tightfit.units import KIB, MIB

EITHER = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def make(sizes: list[int], *, expandable: bool = False) -> CachingAllocator:
    """An allocator that holds storages 0, 1, ... of these sizes."""
    allocator = CachingAllocator(expandable_segments=expandable)
    for key, size in enumerate(sizes):
        allocator.resize(key, size)
    return allocator


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not worth a block
        (13 * MIB + 1, 14 * MIB, 14 * MIB),
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_sizes_are_rounded_as_torch_rounds_them(size: int, allocated: int, reserved: int) -> None:
    allocator = make([size])
    assert allocator.allocated_bytes == allocated
    assert allocator.reserved_bytes == reserved


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([MIB, MIB], 2 * MIB),  # one small segment holds both
        ([MIB, MIB, 1], 4 * MIB),
        ([5 * MIB] * 4, 20 * MIB),  # one large segment holds four
        ([5 * MIB] * 5, 40 * MIB),
        ([11 * MIB, MIB], 14 * MIB),  # pools do not mix
    ],
)
def test_segments_are_shared(sizes: list[int], reserved: int) -> None:
    assert make(sizes).reserved_bytes == reserved


def test_expandable_segments_grow_by_pages() -> None:
    assert make([11 * MIB], expandable=True).reserved_bytes == 20 * MIB
    assert make([11 * MIB, 11 * MIB], expandable=True).reserved_bytes == 40 * MIB
    assert make([100 * MIB, 3 * KIB], expandable=True).reserved_bytes == 102 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = make([40 * MIB, 30 * MIB])
    allocator.resize(0, 0)
    allocator.resize(1, 0)
    allocator.resize(2, 29 * MIB)  # into 30, not 40
    allocator.resize(3, 40 * MIB)
    assert allocator.reserved_bytes == 70 * MIB


def test_neighbours_that_are_free_become_one() -> None:
    allocator = make([5 * MIB] * 4)
    for key in (0, 2, 1):
        allocator.resize(key, 0)
    allocator.resize(9, 15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_hole_that_is_too_small_is_why_reserved_grows() -> None:
    """What expandable segments were made for: the end of a segment is joined to new pages."""
    reserved = {}
    for expandable in (False, True):
        allocator = make([40 * MIB], expandable=expandable)
        allocator.resize(0, 0)
        allocator.resize(1, 60 * MIB)
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: 100 * MIB, True: 60 * MIB}


def test_a_storage_that_grows_has_two_blocks_for_a_moment() -> None:
    allocator = make([20 * MIB])
    allocator.resize(0, 40 * MIB)
    assert allocator.allocated_bytes == 40 * MIB
    assert allocator.max_allocated_bytes == 60 * MIB
    before = allocator.max_allocated_bytes
    allocator.resize(0, 40 * MIB)
    assert allocator.max_allocated_bytes == before


@EITHER
def test_segments_stay_until_the_cache_is_emptied(expandable: bool) -> None:
    allocator = make([100 * MIB, 3 * MIB, KIB], expandable=expandable)
    held = allocator.reserved_bytes
    for key in range(3):
        allocator.resize(key, 0)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, held)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.max_reserved_bytes == held
    allocator.resize(0, 100 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


def test_a_full_card_gets_its_free_segments_back_first() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.resize(0, 60 * MIB)
    allocator.resize(0, 0)
    allocator.resize(1, 80 * MIB)  # 60 + 80 would not fit
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"30\.0 MiB do not fit: of 100\.0 MiB 80\.0"):
        allocator.resize(2, 30 * MIB)


def test_a_middle_page_is_given_back_too() -> None:
    allocator = make([20 * MIB, 40 * MIB, 20 * MIB], expandable=True)
    allocator.resize(1, 0)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.resize(3, 40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


TRACES = st.lists(
    st.one_of(
        st.tuples(
            st.integers(0, 12),
            st.one_of(st.just(0), st.integers(1, 3000), st.integers(1, 64).map(lambda n: n * MIB)),
        ),
        st.just(None),
    ),
    max_size=60,
)


@EITHER
@given(trace=TRACES)
def test_invariants(expandable: bool, trace: list[tuple[int, int] | None]) -> None:
    """Blocks never overlap, hold what was asked for and no more than is reserved."""
    allocator = CachingAllocator(expandable_segments=expandable)
    sizes: dict[int, int] = {}
    for event in trace:
        if event is None:
            allocator.empty_cache()
        else:
            key, size = event
            allocator.resize(key, size)
            sizes[key] = size
        blocks = sorted(allocator.blocks())
        assert all(a[1] <= b[0] for a, b in pairwise(blocks))
        assert all(address % BLOCK_BYTES == 0 for address, _ in blocks)
        assert len(blocks) == sum(size > 0 for size in sizes.values())
        assert allocator.allocated_bytes == sum(end - address for address, end in blocks)
        assert sum(sizes.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.allocated_bytes <= allocator.max_allocated_bytes
        assert allocator.reserved_bytes <= allocator.max_reserved_bytes
    for key in sizes:
        allocator.resize(key, 0)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


class _Replaying(Ledger):
    """A ledger that tells an allocator of storages as they come and go."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self._allocator = allocator
        self._sizes: dict[int, int] = {}

    def _add(self, record, change):  # type: ignore[no-untyped-def]
        super()._add(record, change)
        key = id(record)
        self._sizes[key] = self._sizes.get(key, 0) + change
        self._allocator.resize(key, self._sizes[key] if record.tier is Tier.DEVICE else 0)


@EITHER
def test_a_ledger_can_be_replayed(expandable: bool) -> None:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    allocator = CachingAllocator(expandable_segments=expandable)
    with fake_tensors():
        model = LlamaForCausalLM(config)
        with _Replaying(allocator) as counting:
            counting.adopt(model)
            ids = torch.zeros(2, 256, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    peak = counting.peak_bytes(Tier.DEVICE)
    assert peak <= allocator.max_allocated_bytes <= 1.05 * peak
    assert allocator.max_allocated_bytes <= allocator.max_reserved_bytes <= 1.5 * peak
    assert allocator.allocated_bytes >= counting.total_bytes(Tier.DEVICE)
