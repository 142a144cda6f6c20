"""What is left out because it repeats takes nothing that the rest does not."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from tightfit.dry_run import repeats
from tightfit.dry_run.run import run
from tightfit.facts.workload import Workload
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    LossKind,
    LossPolicy,
    Policies,
    PrecisionPolicy,
    ShardingPolicy,
)

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
CHUNKED = LossPolicy(LossKind.CHUNKED, 5)  # of 3 x 16 tokens: nine chunks and one of three
WAYS = [
    Policies(loss=CHUNKED),
    Policies(loss=CHUNKED, batch=BatchPolicy(3, 2), precision=PrecisionPolicy("bf16")),
    Policies(loss=CHUNKED, adapter=AdapterPolicy(rank=2), precision=PrecisionPolicy("bf16")),
    Policies(loss=CHUNKED, sharding=ShardingPolicy(2, tensor_parallel=2)),
]


@pytest.mark.parametrize("card", [None, (8, 0)])
@pytest.mark.parametrize("policies", WAYS, ids=range(len(WAYS)))
def test_few_chunks_take_what_all_do(
    policies: Policies, card: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(16, 6)
    run(CONFIG, policies, workload, full_depth=True, card=card)  # what torch makes once is made
    few = run(CONFIG, policies, workload, full_depth=True, card=card)
    monkeypatch.setattr(repeats, "_FIRST", 10)
    assert few == run(CONFIG, policies, workload, full_depth=True, card=card)
