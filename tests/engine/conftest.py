"""Tiny models, batches and a plain training loop to hold the engine against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.policies import OptimizerPolicy

VOCABULARY = 61
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    """A Llama of two layers, the same bits at every call."""

    def make(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
        config = LlamaConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **changes,
            }
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype)

    return make


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Input ids and labels `[batch, seq]`, some of them -100, from a seed."""

    def make(seed: int, batch_size: int = 4, length: int = 11) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < 0.3] = -100
        return ids, labels

    return make


@pytest.fixture
def trained() -> Callable[[torch.Tensor], int]:
    """How many positions of labels `[batch, seq]` carry loss."""
    return lambda labels: int((labels[:, 1:] != -100).sum())


@pytest.fixture
def plain_optimizer() -> Callable[[nn.Module, OptimizerPolicy], torch.optim.Optimizer]:
    """torch's own AdamW with the customary decay groups."""

    def make(model: nn.Module, policy: OptimizerPolicy) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": policy.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=policy.learning_rate,
            betas=policy.betas,
            eps=policy.epsilon,
            fused=True,
        )

    return make
