"""Dry runs of every placement beside the ledger of real ones, at full depth and extrapolated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dry_run.test_dry_run import one_step, real_batch
from tests.engine.sharded_runs import without_values
from tests.engine.test_placement import PLACEMENTS
from tests.taken import every
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.bill.table import MemoryTable, Phase
from tightfit.dry_run import dry_run
from tightfit.engine import activations
from tightfit.engine.apply import fit
from tightfit.facts.workload import Workload
from tightfit.ledger import Ledger
from tightfit.policies import (
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    Policies,
    Tier,
)

CONFIG = LlamaConfig(
    vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
)  # fmt: skip
WORKLOAD = Workload(24, 4, evaluation_sequence_length=30, evaluation_batch_size=2)
# Of the last step's factor, which a thread, or states on the disk, keep until the next step.
CLIP_BYTES = 4
MEASURED = [phase for phase in Phase if phase not in (Phase.SAVE, Phase.RESUME)]


@pytest.fixture(autouse=True)
def small_tensors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_LEAVING_BYTES", 1)


def measure(policies: Policies, folder: Path) -> MemoryTable:
    """Three optimizer steps, the lazy ones awaited, and an evaluation on real tensors."""
    torch.manual_seed(0)
    model, fill = without_values(LlamaForCausalLM(CONFIG))
    with Ledger() as counting:
        engine = fit(model, policies, offload_folder=folder, values=fill)
        for _ in range(3):
            one_step(engine, policies, WORKLOAD)
            engine.drain()
        batch = real_batch(WORKLOAD.evaluation_batch_size, WORKLOAD.evaluation_sequence_length)
        engine.evaluation_loss(*batch)
    return counting.table()


def totals(table: MemoryTable) -> dict[tuple[Phase, Tier], int]:
    return {
        (phase, tier): table.phase_peak_bytes(phase, tier) for phase in MEASURED for tier in Tier
    }


# Checkpointing and the kinds of loss take turns.
CASES = [
    (name, number % 2 == 0, list(LossKind)[number // 2 % len(LossKind)])
    for number, name in enumerate(PLACEMENTS)
]


@pytest.mark.parametrize(("name", "checkpointing", "loss"), every(4, CASES))
def test_a_dry_run_is_what_a_placed_run_takes(
    name: str, checkpointing: bool, loss: LossKind, tmp_path: Path
) -> None:
    policies = Policies(
        placement=PLACEMENTS[name],
        batch=BatchPolicy(2, 2),
        checkpointing=CheckpointingPolicy(checkpointing),
        loss=LossPolicy(loss),
    )
    found = totals(measure(policies, tmp_path))
    left = CLIP_BYTES if policies.placement.optimizer_states is not Tier.DEVICE else 0
    for full_depth in (True, False):
        said = totals(dry_run(CONFIG, policies, WORKLOAD, full_depth=full_depth).table)
        assert said.keys() == found.keys()
        for place, count_bytes in said.items():
            assert found[place] - left <= count_bytes <= found[place], (place, full_depth)
