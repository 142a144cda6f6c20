"""Held-out loss and sample answers, with no more memory than the bill says.

The loss is weighted by tokens, so it does not depend on the batch size; answers are greedy, one
at a time. Does not know when it is asked, or what its numbers decide.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import overload

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
    if engine.is_stage:
        return _shown(tokenizer, _through_stages(engine, prompt, max_new_tokens))
    with engine.evaluating():
        tokens = engine.model.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return _shown(tokenizer, tokens[0, prompt.shape[1] :].tolist())


def _through_stages(engine: Engine, prompt: torch.Tensor, max_new_tokens: int) -> list[int]:
    """The greedy answer's tokens, each by a forward of all before it: stages keep no cache."""
    ends = engine.model.generation_config.eos_token_id  # type: ignore[union-attr]
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        so_far = torch.cat([prompt, prompt.new_tensor([tokens])], dim=1)
        tokens.append(int(engine.next_token(so_far)))
        if tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            break
    return tokens


def _shown(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text.strip()


class MicroBatches(Sequence[tuple[torch.Tensor, torch.Tensor]]):
    """Input ids and labels `[batch, seq]` of micro-batches, padded and moved when looked up.

    Args:
        groups: the samples of each.
    """

    def __init__(
        self, groups: Sequence[Sequence[Sample]], pad_token_id: int, device: torch.device
    ) -> None:
        self._groups = groups
        self._pad_token_id = pad_token_id
        self._device = device

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> MicroBatches: ...

    def __getitem__(self, index: int | slice) -> tuple[torch.Tensor, torch.Tensor] | MicroBatches:
        if isinstance(index, slice):
            return MicroBatches(self._groups[index], self._pad_token_id, self._device)
        batch = on_device(collate(self._groups[index], self._pad_token_id), self._device)
        return batch.input_ids, batch.labels

    @property
    def tokens(self) -> int:
        """Positions of all, padding included."""
        return sum(len(g) * max(len(sample.input_ids) for sample in g) for g in self._groups)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, booked as buffers."""
    moved = Batch(batch.input_ids.to(device), batch.labels.to(device))
    for tensor in (moved.input_ids, moved.labels):
        ledger.mark(tensor, Kind.BUFFERS)
    return moved
