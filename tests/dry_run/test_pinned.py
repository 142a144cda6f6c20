"""Host tensors of a job for a card are page-locked, in blocks of powers of two."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from tightfit.bill.table import Kind, Phase
from tightfit.dry_run import dry_run
from tightfit.dry_run.pinned import pinned_host
from tightfit.engine.transfer import Transfer
from tightfit.facts.workload import Workload
from tightfit.ledger import Ledger
from tightfit.policies import PlacementPolicy, Policies, PrecisionPolicy, Tier


def test_blocks_are_powers_of_two() -> None:
    with Ledger() as counting, pinned_host():
        tensor = Transfer(torch.device("cpu")).empty_on_host(torch.zeros(3, 100), Kind.GRADIENTS)
        assert tensor.shape == (3, 100)
        assert tensor.dtype is torch.float32
        assert counting.kinds(Tier.PINNED) == {Kind.GRADIENTS: 2048}
    assert Transfer(torch.device("cpu")).host_tier is Tier.HOST


def test_what_travels_is_pinned_and_moments_are_not() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    policies = Policies(
        placement=PlacementPolicy(Tier.HOST, Tier.HOST), precision=PrecisionPolicy("bf16")
    )
    here, card = (
        dry_run(config, policies, Workload(8, 1), card=card).table.peaks[Phase.STEP]
        for card in (None, (8, 0))
    )
    assert Tier.PINNED not in here
    assert {*card[Tier.PINNED]} == {Kind.GRADIENTS, Kind.MASTER_WEIGHTS}
    assert card[Tier.PINNED][Kind.MASTER_WEIGHTS] >= here[Tier.HOST][Kind.MASTER_WEIGHTS]
    assert card[Tier.HOST][Kind.OPTIMIZER_STATES] == here[Tier.HOST][Kind.OPTIMIZER_STATES]
