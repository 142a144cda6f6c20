"""Host tensors of a job for a card are page-locked, exactly as large as without one."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from tightfit.bill.table import Kind, Phase
from tightfit.dry_run import dry_run
from tightfit.dry_run.pinned import pinned_host
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer
from tightfit.facts.workload import Workload
from tightfit.ledger import Ledger
from tightfit.policies import PlacementPolicy, Policies, PrecisionPolicy, Tier

CPU = torch.device("cpu")


def test_slabs_are_locked_and_no_larger() -> None:
    with Ledger() as counting, pinned_host():
        slab = HostSlab(CPU)
        slab.reserve((3, 100), torch.float32, Kind.GRADIENTS)
        slab.allocate()
        assert counting.kinds(Tier.PINNED) == {Kind.GRADIENTS: 1200}
        assert Transfer(CPU).host_tier is Tier.PINNED
    assert Transfer(CPU).host_tier is Tier.HOST


def test_what_travels_is_pinned_with_a_card() -> None:
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
    for kind in (Kind.GRADIENTS, Kind.TRANSFER):  # exactly as many bytes, on another tier
        assert card[Tier.PINNED][kind] == here[Tier.HOST][kind] > 0
        assert kind not in card[Tier.HOST]
    for kind in (Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES):  # 16-bit parameters travel instead
        assert card[Tier.HOST][kind] == here[Tier.HOST][kind] > 0
