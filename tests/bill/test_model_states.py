from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from tightfit.bill.model_states import model_state_bytes
from tightfit.bill.table import Kind
from tightfit.dry_run import dry_run
from tightfit.facts.workload import Workload
from tightfit.policies import AdapterPolicy, PlacementPolicy, Policies, PrecisionPolicy, Tier

STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES, Kind.MASTER_WEIGHTS)
HOST = PlacementPolicy(Tier.HOST, Tier.HOST)
FP32, BF16 = PrecisionPolicy("fp32"), PrecisionPolicy("bf16")


@pytest.mark.parametrize(
    ("policies", "device", "host"),
    [
        # Bytes per trainable parameter: weight + gradient + master + two moments.
        (Policies(), 4 + 4 + 8, 0),
        (Policies(placement=HOST), 4, 4 + 4 + 8),
        (Policies(precision=BF16), 2 + 2 + 4 + 8, 0),
        (Policies(precision=BF16, placement=HOST), 2, 2 + 4 + 8),
    ],
)
def test_bytes_per_parameter(policies: Policies, device: int, host: int) -> None:
    table = model_state_bytes(1000, 0, policies)
    assert sum(table[Tier.DEVICE].values()) == 1000 * device
    assert sum(table.get(Tier.HOST, {}).values()) == 1000 * host


def test_frozen_parameters_have_nothing_but_themselves() -> None:
    with_frozen = model_state_bytes(1000, 500, Policies())
    without = model_state_bytes(1000, 0, Policies())
    difference = Counter(with_frozen[Tier.DEVICE])
    difference.subtract(without[Tier.DEVICE])
    assert {kind: count for kind, count in difference.items() if count} == {
        Kind.PARAMETERS: 500 * 4
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapter", [None, AdapterPolicy(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_closed_form_equals_the_dry_run(
    tied: bool,
    adapter: AdapterPolicy | None,
    placement: PlacementPolicy,
    precision: PrecisionPolicy,
) -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    policies = replace(Policies(precision=precision, placement=placement), adapter=adapter)
    run = dry_run(config, policies, Workload(sequence_length=4, global_batch_size=1))
    counted = {tier: _most_of_each(run.table.to_json(), tier) for tier in (Tier.DEVICE, Tier.HOST)}
    closed = model_state_bytes(run.trainable, run.frozen, policies)
    # AdamW's step counters, one fp32 number per trainable tensor, are not in the closed form.
    states = placement.optimizer_states
    counters = counted[states][Kind.OPTIMIZER_STATES] - closed[states][Kind.OPTIMIZER_STATES]
    tensors = 2 * (7 * 2 if adapter else 9) + (0 if adapter else 2 if tied else 3)
    assert counters == 4 * tensors
    counted[states][Kind.OPTIMIZER_STATES] -= counters
    for tier in (Tier.DEVICE, Tier.HOST):
        expected = {kind: count for kind, count in closed.get(tier, {}).items() if count}
        moved = tier is Tier.DEVICE and placement is HOST  # a few gradients on their way
        found = {k: v for k, v in counted[tier].items() if not (moved and k is Kind.GRADIENTS)}
        assert found == expected


def _most_of_each(table: dict[str, dict[str, dict[str, int]]], tier: Tier) -> dict[Kind, int]:
    """Every kind of model states at the peak of the step, where all of them live."""
    kinds = table["step"].get(str(tier), {})
    return {kind: kinds[str(kind)] for kind in STATES if str(kind) in kinds}


def test_the_bill_imports_no_torch() -> None:
    program = "import sys, tightfit.bill.model_states; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
