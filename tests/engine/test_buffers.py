"""Buffers are lent again, none too small, and become one piece of exactly what was needed."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.postponed import PostponedTransfer

from tightfit.bill.table import Kind
from tightfit.engine import buffers as module
from tightfit.engine.buffers import Buffer, HostBuffers
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer
from tightfit.ledger import Ledger
from tightfit.policies import Tier

CPU = torch.device("cpu")
Slabs = list[HostSlab]


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> Slabs:
    """Those that are made."""
    made: Slabs = []

    def make(device: torch.device) -> HostSlab:
        made.append(HostSlab(device))
        return made[-1]

    monkeypatch.setattr(module, "HostSlab", make)
    return made


def make() -> HostBuffers:
    return HostBuffers(Transfer(CPU), Kind.ACTIVATIONS)


def one_round(buffers: HostBuffers, needs: list[int]) -> list[Buffer]:
    """As a forward and its backward do it."""
    buffers.settle()
    lent = [buffers.lend(need) for need in needs]
    buffers.note()
    for buffer in reversed(lent):
        buffers.give_back(buffer)
    return lent


def addresses(lent: list[Buffer]) -> set[int]:
    return {buffer.memory.data_ptr() for buffer in lent}


def test_a_round_is_pageable_and_those_after_it_are_one_piece(slabs: Slabs) -> None:
    buffers = make()
    needs = [300, 5, 128, 300]
    first = one_round(buffers, needs)
    assert not slabs
    assert buffers.held_bytes == sum(needs)
    second = one_round(buffers, needs)
    third = one_round(buffers, needs)
    assert len(slabs) == 1
    assert buffers.held_bytes == sum(needs)
    assert addresses(second) == addresses(third)
    assert not addresses(first) & addresses(second)
    begins = sorted(addresses(second))
    assert begins[-1] - begins[0] < 1000, "one piece"


def test_pageable_ones_are_gone_before_the_piece_is_made() -> None:
    with Ledger() as counting:
        buffers = make()
        one_round(buffers, [1000, 2000])
        assert counting.kinds(Tier.HOST) == {Kind.ACTIVATIONS: 3000}
        one_round(buffers, [1000, 2000])
        assert counting.kinds(Tier.HOST) == {Kind.ACTIVATIONS: 3000}
        assert counting.peak_bytes(Tier.HOST) == 3000


def test_nothing_is_made_anew_while_something_is_lent(slabs: Slabs) -> None:
    buffers = make()
    kept = buffers.lend(100)
    buffers.note()
    buffers.settle()
    assert not slabs
    assert buffers.lent_bytes == 100
    buffers.give_back(kept)
    assert buffers.lent_bytes == 0
    buffers.settle()
    assert len(slabs) == 1


def test_more_than_ever_is_pageable_until_nothing_is_lent(slabs: Slabs) -> None:
    buffers = make()
    one_round(buffers, [100, 50])
    one_round(buffers, [100, 50])
    one_round(buffers, [60, 120, 10])
    assert buffers.held_bytes == 100 + 50 + 120, "those there are take the 60 and the 10"
    assert len(slabs) == 1
    one_round(buffers, [60, 120, 10])
    assert len(slabs) == 2
    assert buffers.held_bytes == 120 + 60 + 10, "the most of each rank, not all ever seen"
    one_round(buffers, [100, 50])
    assert len(slabs) == 2, "what is smaller fits"


def test_memory_is_given_up_after_copies_have_arrived(slabs: Slabs) -> None:
    transfer = PostponedTransfer(CPU)
    buffers = HostBuffers(transfer, Kind.ACTIVATIONS)
    lent = buffers.lend(8)
    transfer.copy(lent.memory, torch.zeros(8, dtype=torch.uint8))
    buffers.note()
    buffers.give_back(lent)
    assert transfer.pending
    buffers.settle()
    assert not transfer.pending


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_smaller_needs_in_any_order_never_need_more(
    pairs: list[tuple[int, int]], order: random.Random
) -> None:
    """The longest batch comes first: each tensor of another is at most as large as its own."""
    longest = [a + b for a, b in pairs]
    shorter = [a for a, _ in pairs]
    order.shuffle(shorter)
    buffers = make()
    one_round(buffers, longest)
    lent = one_round(buffers, shorter)
    assert all(buffer.size_bytes >= need for buffer, need in zip(lent, shorter, strict=True))
    assert len(addresses(lent)) == len(shorter)
    assert buffers.held_bytes == sum(longest)
