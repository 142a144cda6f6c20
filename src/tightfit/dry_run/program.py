"""What a training run does, once each: load, resume, a step, an evaluation, an answer, a save.

Fake tensors cannot be followed to the disk; what reads and writes files is said here.
"""

from __future__ import annotations

import math
from itertools import chain

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.engine.engine import Engine
from tightfit.engine.regions import Region
from tightfit.facts.workload import Workload
from tightfit.ledger import local_part
from tightfit.policies import Policies, Tier


def fill(name: str, values: torch.Tensor, region: Region) -> None:
    """Weights are read into the tensor given, and no other."""


def resume(engine: Engine) -> None:
    """The states of a checkpoint, and adapters, are read one by one into those that were just
    made (training/checkpoint.py)."""
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    with ledger.phase(Phase.RESUME):
        _hold_on_host(max(4 * local_part(p).numel() for p in trained))  # states are fp32


def save(engine: Engine, policies: Policies, *, card: bool) -> None:
    """Files are written from where tensors are, each rank its parts (training/checkpoint.py). Those
    of a card are copied to the host first, one by one. What is on a disk is read: one parameter,
    and the states of one, at a time."""
    engine.drain()
    ledger.set_phase(Phase.SAVE)
    placement = policies.placement
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    for parameter in trained:
        values = engine.values(parameter)
        if card and _is_same(values, local_part(parameter)):
            _hold_on_host(_bytes(values))
        del values
    _open_section("states")
    entries = [
        [math.prod(shape) * dtype.itemsize for dtype, shape in states.values()]
        for parameter in trained
        for states in [engine.optimizer.state_entries(parameter)]
    ]
    if placement.optimizer_states is Tier.NVME:
        _hold_on_host(max(map(sum, entries)))
    elif card and (placement.optimizer_states is Tier.DEVICE or placement.optimizer_fraction < 1):
        _hold_on_host(max(chain.from_iterable(entries), default=0))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _open_section(name: str) -> None:
    """Count what comes apart from the rest of the phase, so that each grows along its own line."""
    counting = ledger.active()
    if counting is not None:
        counting.set_section(counting.section[0], name)


def _hold_on_host(count_bytes: int) -> None:
    """Memory that is there for a moment."""
    with ledger.labelled(Kind.BUFFERS, Tier.HOST):
        held = torch.empty(count_bytes, dtype=torch.uint8)
    del held


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def train_step(engine: Engine, policies: Policies, workload: Workload) -> None:
    """The second micro-batch already sees what accumulates, so two stand for any number.

    They are counted apart: with few layers the first may take more, with many the second. Stages
    of a pipeline have as many at a time as their schedule says.
    """
    counting = ledger.active()
    if engine.is_stage:
        batch = policies.batch
        size = batch.micro_batch_size, workload.sequence_length
        engine.forward_backward(
            [fake_batch(*size) for _ in range(batch.accumulation_steps)], workload.tokens_per_step
        )
        if counting is not None:
            counting.chapter = ""
        engine.step()
        return
    for index in range(policies.batch.accumulation_steps):
        if counting is not None:
            counting.chapter = "later micro-batch, " * index
        input_ids, labels = fake_batch(policies.batch.micro_batch_size, workload.sequence_length)
        loss = engine.loss(input_ids, labels, workload.tokens_per_step)
        engine.backward(loss)
        del loss
    if counting is not None:
        counting.chapter = ""
    engine.step()


def evaluate(engine: Engine, workload: Workload) -> None:
    """The loss of one batch of the longest held-out sequences, if any are held out."""
    if workload.evaluation_sequence_length:
        _open_section("evaluation's batch")
        input_ids, labels = fake_batch(
            workload.evaluation_batch_size, workload.evaluation_sequence_length
        )
        engine.evaluation_loss(input_ids, labels)


def generate(engine: Engine, workload: Workload) -> None:
    """The prompt, and the last token of the answer, when the cache is longest."""
    if not workload.prompt_length:
        return
    with engine.evaluating():
        _answer(engine, workload)


def _answer(engine: Engine, workload: Workload) -> None:
    if engine.is_stage:
        tokens, _ = fake_batch(1, workload.prompt_length + workload.max_new_tokens)
        engine.next_token(tokens)
        return
    # What `generate` keeps beside the cache: tokens, mask, positions, and one of them as it grows.
    tokens, others = fake_batch(2, workload.prompt_length + workload.max_new_tokens)
    prompt = tokens[:1, : workload.prompt_length]
    cache = engine.model(input_ids=prompt, use_cache=True, logits_to_keep=1).cache
    if workload.max_new_tokens > 1:
        _lengthen(cache, workload.max_new_tokens - 2)
        engine.model(input_ids=tokens[:1, :1], cache=cache, use_cache=True)
    del others


def _lengthen(cache: Cache, tokens: int) -> None:
    """Put so many tokens into a cache, as if they had been generated one by one."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayerMixin) and layer.keys is not None:
            assert layer.values is not None
            keys, values = (
                old.new_zeros(*old.shape[:-2], tokens, old.shape[-1])
                for old in (layer.keys, layer.values)
            )
            cache.update(keys, values, index)


def fake_batch(batch_size: int, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels `[batch, seq]`, booked as the training loop books them."""
    with ledger.labelled(Kind.BUFFERS):
        shape = (batch_size, sequence_length)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
