"""The held-out loss is a mean over trained tokens, answers are greedy, no memory stays behind."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.facts.labels import IGNORED
from tightfit.ledger import Ledger
from tightfit.policies import CheckpointingPolicy, LossKind, LossPolicy, Policies, Tier
from tightfit.training.evaluation import answer, evaluate, prompt_tokens
from tightfit.training.samples import Sample

LENGTHS = ((9, 7), (30, 2), (17, 16), (4, 1), (30, 29))  # tokens, and how many of them are trained
QUESTION = "What is a tokenizer?"


@pytest.fixture
def model(tiny_model_folder: Path) -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


@pytest.fixture
def samples() -> list[Sample]:
    """Of different lengths and masks, so that batches and tokens weigh differently."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length, trained in LENGTHS:
        ids = torch.randint(3, 300, (length,), generator=generator).tolist()
        labels = [IGNORED] * (length - trained) + ids[length - trained :]
        made.append(Sample(tuple(ids), tuple(labels), "rows.jsonl", len(made) + 1))
    return made


def by_hand(model: LlamaForCausalLM, samples: Sequence[Sample]) -> float:
    """The mean over all trained tokens, one sample after the other, in float64."""
    losses = []
    with torch.no_grad():
        for sample in samples:
            logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1].double()
            targets = torch.tensor(sample.labels[1:])
            losses.append(cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none"))
    trained = sum(sample.trained_tokens for sample in samples)
    return float(torch.cat(losses).sum()) / trained


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", [LossKind.FULL, LossKind.CHUNKED])
def test_every_trained_token_weighs_the_same_whatever_the_batch(
    model: LlamaForCausalLM, samples: list[Sample], batch_size: int, kind: LossKind
) -> None:
    """Float32 sums in another order agree to 1e-6; means of batches would differ by far more."""
    expected = by_hand(model, samples)
    engine = fit(model, Policies(loss=LossPolicy(kind)))
    record = evaluate(engine, samples, batch_size, pad_token_id=0, step=7)
    assert record.loss == pytest.approx(expected, rel=1e-6)
    assert record.step == 7
    assert record.seconds > 0


def test_tokens_weigh_and_not_samples(model: LlamaForCausalLM, samples: list[Sample]) -> None:
    """The test above would not see the difference if these samples hid it."""
    each = [by_hand(model, [sample]) for sample in samples]
    assert abs(sum(each) / len(each) - by_hand(model, samples)) > 1e-4


def test_an_answer_takes_the_likeliest_token_each_time(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = prompt_tokens(tokenizer, QUESTION)
    assert ids.shape[0] == 1
    grown = ids
    with torch.no_grad():
        for _ in range(6):
            likeliest = model(input_ids=grown).logits[:, -1:].argmax(-1)
            grown = torch.cat([grown, likeliest], dim=1)
            if int(likeliest) == tokenizer.eos_token_id:
                break
    expected = tokenizer.decode(grown[0, ids.shape[1] :], skip_special_tokens=True)
    assert isinstance(expected, str)
    engine = fit(model, Policies())
    torch.manual_seed(1)
    first = answer(engine, tokenizer, QUESTION, 6)
    torch.manual_seed(2)
    assert first == expected.strip() == answer(engine, tokenizer, QUESTION, 6)


def everything(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]
) -> None:
    evaluate(engine, samples, 2, pad_token_id=0, step=0)
    answer(engine, tokenizer, QUESTION, 4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_and_mode_are_what_they_were(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    samples: list[Sample],
    checkpointing: bool,
) -> None:
    with Ledger() as ledger:
        ledger.adopt(model)
        engine = fit(model, Policies(checkpointing=CheckpointingPolicy(checkpointing)))
        everything(engine, tokenizer, samples)  # what is made once, like rotary tables, is there
        before = {tier: ledger.total_bytes(tier) for tier in Tier}
        mode = engine.model.training
        everything(engine, tokenizer, samples)
        assert {tier: ledger.total_bytes(tier) for tier in Tier} == before
        assert ledger.peak_bytes(Tier.DEVICE) > before[Tier.DEVICE], "nothing was counted"
    assert engine.model.training is mode
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_an_evaluation_changes_nothing_that_training_sees(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, samples: list[Sample]
) -> None:
    """Two steps with evaluations before each are the steps without them, bit for bit."""
    ids = torch.tensor([samples[1].input_ids])
    results = []
    for evaluated in (False, True):
        engine = fit(deepcopy(model), Policies())
        losses = []
        for _ in range(2):
            if evaluated:
                everything(engine, tokenizer, samples)
            loss = engine.loss(ids, ids, ids.shape[1] - 1)
            engine.backward(loss)
            losses.append((float(loss.detach()), engine.step()))
        results.append(losses)
    assert results[0] == results[1]
