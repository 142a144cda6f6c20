"""Recomputing some layers changes no number, and keeps what the others save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from tightfit.bill.table import Kind, Phase
from tightfit.dry_run import dry_run
from tightfit.engine.apply import fit
from tightfit.engine.layers import decoder_layers
from tightfit.facts.workload import Workload
from tightfit.policies import CheckpointingPolicy, Policies, Tier

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=5,
        num_attention_heads=2, attention_dropout=0.1, **TOKENS,
    ),
    "gpt2": GPT2Config(vocab_size=50, n_embd=16, n_layer=5, n_head=2, n_positions=32, **TOKENS),
}  # fmt: skip


def gradients(config: PretrainedConfig, policy: CheckpointingPolicy) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    engine = fit(model, Policies(checkpointing=policy))
    ids = torch.randint(3, 50, (2, 12))
    torch.manual_seed(1)
    engine.backward(engine.loss(ids, ids, 22))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_gradients_are_those_of_the_plain_run(name: str, every: int) -> None:
    """Bitwise, dropout included."""
    plain = gradients(CONFIGS[name], CheckpointingPolicy())
    recomputed = gradients(CONFIGS[name], CheckpointingPolicy(True, every))
    assert len(plain) == len(recomputed)
    assert all(map(torch.equal, plain, recomputed))


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_every_so_many_layers_are_recomputed(every: int, recomputed: list[int]) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    fit(model, Policies(checkpointing=CheckpointingPolicy(True, every)))
    layers = decoder_layers(model)
    assert [i for i, layer in enumerate(layers) if layer.gradient_checkpointing] == recomputed


def test_selective_is_between_all_and_none() -> None:
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": 12})
    kept = [
        dry_run(config, Policies(checkpointing=policy), Workload(16, 1))
        .table.peaks[Phase.FORWARD][Tier.DEVICE][Kind.ACTIVATIONS]
        for policy in (
            CheckpointingPolicy(True), CheckpointingPolicy(True, 2), CheckpointingPolicy()
        )
    ]  # fmt: skip
    assert kept[0] < kept[1] < kept[2]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=0.1)


@pytest.mark.parametrize("layers", [9, 10])
def test_selective_is_extrapolated_as_it_alternates(layers: int) -> None:
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": layers})
    policies = Policies(checkpointing=CheckpointingPolicy(True, 2))
    work = Workload(16, 1)
    assert dry_run(config, policies, work) == dry_run(config, policies, work, full_depth=True)
