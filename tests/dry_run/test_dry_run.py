"""The project's claim: a dry run, extrapolated, is what a real run takes, byte for byte.

Nothing is allowed for: every total of every phase and tier must be equal.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.sharded_runs import without_values
from tests.taken import every
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tightfit import ledger
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import dry_run
from tightfit.dry_run.config import load_config
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.engine.precision import DTYPES
from tightfit.errors import InputError
from tightfit.facts.workload import Workload
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 16}  # shorter than the sequences
CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, **WINDOW),
    "gpt2": GPT2Config(
        vocab_size=211,
        n_embd=32,
        n_layer=6,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "moe": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 8},
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "late-moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    ),
    "gemma2": Gemma2Config(**{**SIZES, "num_hidden_layers": 8}, **WINDOW, head_dim=8),
}
WORKLOAD = Workload(
    sequence_length=24,
    global_batch_size=6,
    evaluation_sequence_length=30,
    evaluation_batch_size=2,
)

TECHNIQUES: dict[str, dict[str, Any]] = {
    "accumulate": {"batch": BatchPolicy(2, 3)},
    "checkpoint": {"checkpointing": CheckpointingPolicy(True)},
    "chunk": {"loss": LossPolicy(LossKind.CHUNKED, 20)},
    "host": {"placement": PlacementPolicy(Tier.HOST, Tier.HOST)},
    "lora": {"adapter": AdapterPolicy(rank=2)},
    "selective": {"checkpointing": CheckpointingPolicy(True, 2)},
    "eager": {"attention": AttentionPolicy(AttentionKernel.EAGER)},
    "bf16": {"precision": PrecisionPolicy("bf16")},
}
CASES = [
    "llama-tied",
    "llama-tied accumulate host",
    "llama-tied lora checkpoint bf16",
    "llama accumulate host chunk lora",
    "qwen2 chunk",
    "qwen3 bf16 host",
    "mistral host chunk checkpoint",
    "gpt2 accumulate",
    "gpt2 checkpoint lora",
    "gemma2 checkpoint eager",
    "moe",
    "moe selective",
    "late-moe lora checkpoint",
    "qwen3 selective host",
    "llama eager",
]
# Saving and resuming are not the engine's.
MEASURED = [phase for phase in Phase if phase not in (Phase.SAVE, Phase.RESUME)]


def policies_of(case: str) -> Policies:
    techniques = [TECHNIQUES[name] for name in case.split()[1:]]
    return replace(
        Policies(), **{key: value for technique in techniques for key, value in technique.items()}
    )


@pytest.mark.parametrize("case", every(3, CASES))
def test_extrapolated_bill_is_what_a_real_run_takes(case: str) -> None:
    config, policies = CONFIGS[case.split()[0]], policies_of(case)
    extrapolated = dry_run(config, policies, WORKLOAD)
    full = dry_run(config, policies, WORKLOAD, full_depth=True)
    model = real_model(config, policies)
    measured, engine = measure(model, policies, WORKLOAD)

    assert extrapolated == full
    assert totals(full.table) == totals(measured)
    assert full.table.peaks[Phase.STEP] == measured.peaks[Phase.STEP], "kinds as well"
    trainable = [p for p in engine.model.parameters() if p.requires_grad]
    assert full.trainable == sum(parameter.numel() for parameter in trainable)
    assert full.trainable + full.frozen == sum(p.numel() for p in engine.model.parameters())


def real_model(config: PretrainedConfig, policies: Policies) -> PreTrainedModel:
    torch.manual_seed(0)
    dtype = DTYPES[policies.precision.parameters]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def measure(
    model: PreTrainedModel, policies: Policies, workload: Workload
) -> tuple[MemoryTable, Engine]:
    """Two optimizer steps and an evaluation on real tensors, of a model without values at first."""
    empty, fill = without_values(model)
    with Ledger() as counting:
        engine = fit(empty, policies, values=fill)
        for _ in range(2):
            one_step(engine, policies, workload)
        batch = real_batch(workload.evaluation_batch_size, workload.evaluation_sequence_length)
        engine.evaluation_loss(*batch)
    return counting.table(), engine


def one_step(engine: Engine, policies: Policies, workload: Workload) -> None:
    for _ in range(policies.batch.accumulation_steps):
        batch = real_batch(policies.batch.micro_batch_size, workload.sequence_length)
        loss = engine.loss(*batch, workload.tokens_per_step)
        engine.backward(loss)
        del loss
    assert engine.step() > 0


def real_batch(batch_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    with ledger.labelled(Kind.BUFFERS):
        ids = torch.randint(3, 200, (batch_size, length))
        labels = ids.clone()
    labels[:, :5].fill_(-100)
    return ids, labels


def totals(table: MemoryTable) -> dict[tuple[Phase, Tier], int]:
    return {
        (phase, tier): table.phase_peak_bytes(phase, tier) for phase in MEASURED for tier in Tier
    }


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("prompt", "answer"), [(30, 2), (16, 16)])
def test_generation_is_never_below_what_it_takes(name: str, prompt: int, answer: int) -> None:
    config = CONFIGS[name]
    workload = Workload(
        sequence_length=8, global_batch_size=1, prompt_length=prompt, max_new_tokens=answer
    )
    table = dry_run(config, Policies(), workload).table
    model = real_model(config, Policies())
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    with Ledger() as counting:
        counting.adopt(model)
        engine = fit(model, Policies())
        one_step(engine, Policies(), workload)
        generate(engine, prompt, answer)
    predicted = table.phase_peak_bytes(Phase.EVAL, Tier.DEVICE)
    measured = counting.table().phase_peak_bytes(Phase.EVAL, Tier.DEVICE)
    assert predicted >= measured
    assert predicted <= measured * 1.03


def generate(engine: Engine, prompt: int, answer: int) -> None:
    ids = torch.ones(1, prompt, dtype=torch.long)
    engine.model.eval()
    with ledger.phase(Phase.EVAL):
        tokens = engine.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer,
            do_sample=False,
            pad_token_id=0,
        )
    assert tokens.shape == (1, prompt + answer)


def test_the_cache_of_generation_is_not_in_the_step() -> None:
    lora = Policies(adapter=AdapterPolicy(rank=2))
    workload = Workload(sequence_length=4, global_batch_size=1)
    generating = replace(workload, prompt_length=50, max_new_tokens=10)
    plain = dry_run(CONFIGS["llama"], lora, workload).table
    table = dry_run(CONFIGS["llama"], lora, generating).table
    assert table.peaks[Phase.STEP] == plain.peaks[Phase.STEP]
    assert table.phase_peak_bytes(Phase.EVAL, Tier.DEVICE) > 0


def test_no_library_is_imported_among_fake_tensors() -> None:
    """peft makes tensors when it is imported; they must be real, and not on the bill."""
    program = """
import gc, torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig
from tightfit.dry_run import dry_run
from tightfit.facts.workload import Workload
from tightfit.policies import AdapterPolicy, Policies
config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
job = config, Policies(adapter=AdapterPolicy(rank=2)), Workload(4, 1)
first = dry_run(*job)
gc.collect()
assert not [o for o in gc.get_objects() if type(o) is FakeTensor]
assert dry_run(*job) == first
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_is_evaluated_when_nothing_is_held_out() -> None:
    table = dry_run(CONFIGS["llama"], Policies(), Workload(8, 1)).table
    assert Phase.EVAL not in table.peaks
    assert Phase.SAVE in table.peaks


def test_chunked_loss_never_holds_all_logits() -> None:
    def logits(kind: LossKind) -> int:
        policies = Policies(loss=LossPolicy(kind, 6))
        table = dry_run(CONFIGS["llama"], policies, WORKLOAD).table
        return max(tiers[Tier.DEVICE].get(Kind.LOGITS, 0) for tiers in table.peaks.values())

    assert logits(LossKind.FULL) >= 24 * 211 * 4
    assert logits(LossKind.CHUNKED) <= 6 * 211 * 4


def test_a_dry_run_allocates_and_changes_nothing() -> None:
    state = torch.get_rng_state()
    big = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32
    )
    run = dry_run(big, Policies(), Workload(64, 1))
    assert run.trainable == 6_738_415_616  # Llama 2 7B
    assert torch.equal(state, torch.get_rng_state())
    assert torch.zeros(1).item() == 0, "no mode is left behind"
    assert ledger.active() is None


def test_config_json_becomes_a_config() -> None:
    config = CONFIGS["qwen3"]
    loaded = load_config(config.to_dict())
    assert type(loaded) is Qwen3Config
    assert loaded.head_dim == 8
    assert loaded.num_hidden_layers == 6


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "nosuch"}, "'nosuch' is unknown to transformers"),
        ({"model_type": "t5"}, "'t5' is not that of a causal language model"),
        ({"model_type": "vit"}, "'vit' is not that of a causal language model"),
        ({"model_type": "gemma3"}, "'gemma3' is not that of .* text alone"),
        ({"model_type": "llama", "vocab_size": 2.5}, "'vocab_size' expected int, got float"),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, "not a multiple"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        load_config(config)
    assert "\n" not in str(raised.value)
