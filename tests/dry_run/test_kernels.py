"""Whole models with a card's kernels: what is counted, and that nothing else changes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.kernels import card_kernels
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.attention import apply_attention, supported_kernels
from tightfit.errors import UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import AttentionKernel, AttentionPolicy, Tier

A100 = (8, 0)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=32),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=32),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=32),
    "gpt2": GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=8, n_positions=4096),
}


def step(
    config: PretrainedConfig,
    length: int,
    kernel: AttentionKernel,
    *,
    card: bool = True,
    checkpointing: bool = False,
    capability: tuple[int, int] = A100,
) -> Ledger:
    """Forward and backward of one sequence in bf16."""
    with fake_tensors():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
        model.train()
        with Ledger() as counting, card_kernels(capability) if card else nullcontext():
            counting.adopt(model)
            apply_attention(model, AttentionPolicy(kernel))
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            counting.set_section(Phase.FORWARD)
            ids = torch.zeros(1, length, dtype=torch.long)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            counting.set_section(Phase.BACKWARD)
            loss.backward()
            counting.set_section(Phase.SAVE)  # what is left afterwards
    return counting


def activations(counting: Ledger) -> int:
    return counting.sections()[Phase.FORWARD, ""][Tier.DEVICE][Kind.ACTIVATIONS]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_runs_and_leaves_the_same_states(name: str) -> None:
    """Also where layers are run again in backward, and with the functions back in place."""
    kernel = supported_kernels(CONFIGS[name])[0]
    if kernel is AttentionKernel.FLASH:
        kernel = AttentionKernel.EAGER
    plain = functional.scaled_dot_product_attention
    runs = [
        step(CONFIGS[name], 128, kernel, card=card, checkpointing=checkpointing)
        for card in (False, True)
        for checkpointing in (False, True)
    ]
    assert functional.scaled_dot_product_attention is plain
    left = [sum(run.sections()[Phase.SAVE, ""][Tier.DEVICE].values()) for run in runs]
    assert len(set(left)) == 1
    assert activations(runs[1]) < activations(runs[0])
    assert activations(runs[3]) < activations(runs[2])


def growth(name: str, kernel: AttentionKernel, *, card: bool = True) -> float:
    """By how much activations grow when sequences become four times as long: 4 without scores."""
    few, more = (
        activations(step(CONFIGS[name], length, kernel, card=card)) for length in (512, 2048)
    )
    return more / few


@pytest.mark.parametrize(
    ("name", "kernel", "has_scores"),
    [
        ("llama", AttentionKernel.SDPA, False),
        ("llama", AttentionKernel.FLASH, False),
        ("llama", AttentionKernel.EAGER, True),
        ("gpt2", AttentionKernel.SDPA, False),  # dropout is a fused kernel's own on a card
        ("gemma2", AttentionKernel.EAGER, True),
        ("gemma2", AttentionKernel.FLASH, False),  # soft-caps inside
        ("mistral", AttentionKernel.SDPA, True),  # a mask as large as one head's scores
        ("mistral", AttentionKernel.FLASH, False),  # windows inside
    ],
)
def test_who_holds_scores(name: str, kernel: AttentionKernel, has_scores: bool) -> None:
    times = growth(name, kernel)
    assert times > 5 if has_scores else times == pytest.approx(4, abs=0.1)


def test_the_cpu_holds_scores_where_attention_has_dropout() -> None:
    """What the dry run would count without a card's kernels."""
    assert growth("gpt2", AttentionKernel.SDPA, card=False) > 5


def test_the_package_is_priced_like_torchs_own_kernel() -> None:
    own, package = (
        step(CONFIGS["llama"], 256, kernel)
        for kernel in (AttentionKernel.SDPA, AttentionKernel.FLASH)
    )
    assert own.sections() == package.sections()


def test_an_old_card_has_no_package() -> None:
    with pytest.raises(UnsupportedError, match=r"8\.0 \(Ampere\).*has 7\.5"):
        step(CONFIGS["llama"], 64, AttentionKernel.FLASH, capability=(7, 5))


def test_dropout_keeps_a_byte_per_element() -> None:
    with fake_tensors(), Ledger() as counting, card_kernels(A100):
        with ledger.labelled(Kind.PARAMETERS):
            tensor = torch.empty(1000, dtype=torch.bfloat16, requires_grad=True)
        kept = nn.Dropout(0.1)(tensor)
        assert counting.total_bytes(Tier.DEVICE) == 2000 + 2000 + 1000
        del kept
        with torch.no_grad():
            same = nn.Dropout(0.1).eval()(tensor)
        assert counting.total_bytes(Tier.DEVICE) == 2000
        assert same is tensor


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "workspace_bytes"),
    [
        (3072, 64, 1000, 0),  # the kernel for few indices sums in place
        (4096, 64, 1000, 8 * 7 * 4096 + 4 * (409 + 1000) * 64),
        (4096, 64, 9000, 8 * 7 * 4096 + 4 * (409 + 4096) * 64),
    ],
)
def test_an_embeddings_gradient_sorts_and_sums_parts(
    tokens: int, width: int, vocabulary: int, workspace_bytes: int
) -> None:
    with fake_tensors(), Ledger() as counting, card_kernels(A100):
        with ledger.labelled(Kind.PARAMETERS):
            table = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
            indices = torch.zeros(1, tokens, dtype=torch.long)
            gradient = torch.empty(1, tokens, width, dtype=torch.bfloat16)
        before = counting.total_bytes(Tier.DEVICE)
        counting.set_section(Phase.FORWARD)
        rows = table(indices)
        assert counting.kinds(Tier.DEVICE)[Kind.ACTIVATIONS] == 2 * tokens * width
        before += 2 * tokens * width
        counting.set_section(Phase.BACKWARD)
        rows.backward(gradient)
    added = sum(counting.sections()[Phase.BACKWARD, ""][Tier.DEVICE].values()) - before
    assert added == 2 * vocabulary * width + workspace_bytes


def test_a_frozen_embedding_has_no_gradient() -> None:
    with fake_tensors(), card_kernels(A100):
        table = nn.Embedding(100, 8).requires_grad_(False)
        assert not table(torch.zeros(4096, dtype=torch.long)).requires_grad


def test_dtensors_keep_torchs_own_functions() -> None:
    with fake_ranks(2), card_kernels(A100):
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)])
        with pytest.warns(UserWarning, match="DTensor random operators"):
            assert isinstance(functional.dropout(whole, 0.5), DTensor)
