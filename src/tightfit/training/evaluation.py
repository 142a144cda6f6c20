"""Held-out loss and sample answers, with no more memory than the bill says.

The loss is weighted by tokens, so it does not depend on the batch size; answers are greedy, one
at a time. Does not know when it is asked, or what its numbers decide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.engine import Engine
from tightfit.monitor.records import EvaluationRecord
from tightfit.training.batches import Batch, collate, rounds, trained_tokens
from tightfit.training.samples import Sample


def evaluate(
    engine: Engine, samples: Sequence[Sample], batch_size: int, pad_token_id: int, step: int
) -> EvaluationRecord:
    """Mean cross-entropy per trained token of `samples`, which all ranks share out."""
    start = time.perf_counter()
    longest_first = sorted(samples, key=lambda sample: -len(sample.input_ids))
    own = 0.0
    for group in rounds(longest_first, batch_size, engine.ranks.data_rank, engine.ranks.data_ranks):
        batch = on_device(collate(group, pad_token_id), engine.device)
        own += engine.evaluation_loss(batch.input_ids, batch.labels)
    loss = engine.ranks.total([own])[0] / trained_tokens(samples)
    return EvaluationRecord(step=step, loss=loss, seconds=time.perf_counter() - start)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    """`question` as the model is asked it: `[1, seq]`."""
    if tokenizer.chat_template is None:
        encoded = tokenizer(question, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def answer(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, question: str, max_new_tokens: int
) -> str:
    """The model's greedy answer."""
    prompt = prompt_tokens(tokenizer, question).to(engine.device)
    with engine.evaluating():
        tokens = engine.model.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    text = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text.strip()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, booked as buffers."""
    moved = Batch(batch.input_ids.to(device), batch.labels.to(device))
    for tensor in (moved.input_ids, moved.labels):
        ledger.mark(tensor, Kind.BUFFERS)
    return moved
