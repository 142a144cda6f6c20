"""A program: training on two real ranks that share parameters, which stay or stream.

    python streamed_runs.py FOLDER

Every case is run with parameters on the device, with them on the host and copies that arrive as
late as they may, and, for its bytes, on fake tensors. Ends with an error where numbers are not the
same bit by bit, or bytes not the same. FOLDER is for the ranks to meet in.
"""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.engine.postponed import PostponedTransfer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.layers import decoder_layers
from tightfit.engine.loss import apply_loss
from tightfit.engine.mesh import Mesh
from tightfit.engine.quantisation import apply_quantisation
from tightfit.engine.quantisation import import_library as import_quantisation
from tightfit.engine.ranks import Ranks
from tightfit.engine.residency import Visitors
from tightfit.engine.sharding import apply_sharding
from tightfit.engine.slab import HostSlab
from tightfit.engine.streaming import ParameterStream
from tightfit.engine.transfer import Transfer
from tightfit.engine.units import Unit, units_of
from tightfit.ledger import Ledger, local_part
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

RANKS, STEPS, VOCABULARY = 2, 2, 61  # an odd vocabulary: shards are padded
ACCIDENTS = {"peek", "fail", "skip", "twice"}
CASES = {  # a stage, techniques, and what happens in the first step
    "3": 1,
    "3 untied checkpoint": 0,
    "3 accumulate peek": 2,
    "3 fail": 1,
    "3 chunk lora": 1,
    "3 qlora checkpoint": 1,
    "3 skip": 1,
    "3 twice": 1,
    "3 half": 1,
    "2 accumulate untied": 1,
    "1 accumulate checkpoint": 1,
    "0 untied": 1,
}  # and the prefetch
# Four units for each step, or in stage 2 for each micro-batch: none for backward, which has them.
FETCHES = {"2 accumulate untied": 4 * 2 * STEPS, "1 accumulate checkpoint": 4 * STEPS}


def main(folder: Path) -> None:
    """Start the ranks."""
    torch.set_num_threads(1)
    import_library()
    import_quantisation()
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = [
        context.Process(target=one_rank, args=(rank, folder)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    while processes:
        wait([process.sentinel for process in processes])
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            sys.exit("a rank failed; its message stands above")
        processes = [process for process in processes if process.exitcode is None]


def one_rank(rank: int, folder: Path) -> None:
    """All cases on one of the ranks; the first one runs the fake ones too."""
    usual = [case for case in CASES if rank == 0 and not ACCIDENTS & set(case.split())]
    fakes = {case: fake_bytes(case) for case in usual}
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=3)
    )
    for case in CASES:
        expected, _ = run(case, streaming=False)
        with patch.object(Visitors, "fetch", autospec=True, side_effect=Visitors.fetch) as fetches:
            numbers, most_bytes = run(case, streaming=True)
        assert fetches.call_count == FETCHES.get(case, fetches.call_count), case
        assert len(expected) == len(numbers) > STEPS, case
        for index, (first, second) in enumerate(zip(expected, numbers, strict=True)):
            assert torch.isfinite(first).all(), (case, index)
            assert torch.equal(first, second), (case, index)
        if case in fakes:
            assert most_bytes == fakes[case], (case, most_bytes, fakes[case])
    dist.destroy_process_group()


def fake_bytes(case: str) -> int:
    with fake_ranks(RANKS), fake_tensors():
        return run(case, streaming=True, fake=True)[1]


class Watching(Ledger):
    """Knows the most parameters that have been on the device at once."""

    most_bytes = 0

    def _add(self, record: Any, change: int) -> None:
        super()._add(record, change)
        now = self._now[Tier.DEVICE][Kind.PARAMETERS]
        self.most_bytes = max(self.most_bytes, now)


@dataclass
class Run:
    words: list[str]
    model: LlamaForCausalLM
    root: nn.Module
    ranks: Ranks
    stream: ParameterStream | None
    fake: bool


def run(case: str, *, streaming: bool, fake: bool = False) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and parameters of a few steps; the most bytes of parameters at once."""
    with ExitStack() as stack:
        counting = Watching()
        if streaming:
            stack.enter_context(counting)
        prepared = prepare(case, streaming=streaming, fake=fake)
        if streaming:
            check_nothing_is_left(prepared, counting)
        counting.most_bytes = 0
        numbers = []
        for step in range(STEPS):
            numbers += one_step(prepared, step, prepared.words if step == 0 else [])
        if streaming:
            assert prepared.stream is not None
            prepared.stream.release()
            check_nothing_is_left(prepared, counting)
    return numbers, counting.most_bytes


def check_nothing_is_left(prepared: Run, counting: Ledger) -> None:
    if not {"half", "qlora"} & set(prepared.words):  # these keep something
        assert Kind.PARAMETERS not in counting.kinds(Tier.DEVICE)


def prepare(case: str, *, streaming: bool, fake: bool) -> Run:
    stage, *words = case.split()
    policies = Policies(
        sharding=ShardingPolicy(RANKS, int(stage)),
        batch=BatchPolicy(2, 2 if "accumulate" in words else 1),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config("untied" not in words))
    ledger_adopts(model)
    apply_quantisation(model, QuantisationPolicy() if "qlora" in words else None)
    lora = {"lora", "qlora"} & set(words)
    torch.manual_seed(1)
    root = apply_adapter(model, AdapterPolicy(rank=2) if lora else None)
    ledger_adopts(root)
    apply_loss(model, LossPolicy(LossKind.CHUNKED if "chunk" in words else LossKind.FULL, 5))
    apply_checkpointing(model, CheckpointingPolicy("checkpoint" in words))
    root.train()
    mesh = Mesh(policies.sharding, torch.device("cpu"))
    ranks = apply_sharding(root, model, policies, mesh)
    stream = None
    if streaming:
        units = units_of(root, model, gathered=policies.sharding.zero_stage > 0)
        fraction = 0.5 if "half" in words else 1.0
        placement = PlacementPolicy(
            parameters=Tier.HOST, prefetch=CASES[case], parameter_fraction=fraction
        )
        stream = stream_of(units, placement, Transfer if fake else PostponedTransfer)
    return Run(words, model, root, ranks, stream, fake)


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=23,  # and those of layers too
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def ledger_adopts(module: nn.Module) -> None:
    counting = ledger.active()
    if counting is not None:
        counting.adopt(module)


def stream_of(
    units: list[Unit], placement: PlacementPolicy, transfer: type[Transfer]
) -> ParameterStream:
    device = torch.device("cpu")
    slab = HostSlab(device)
    stream = ParameterStream(units, placement, transfer(device), slab)
    slab.allocate()
    stream.adopt()
    for unit in units:
        unit.before_use.append(partial(stream.use, unit))
        unit.watch()
    return stream


def one_step(prepared: Run, step: int, unusual: list[str]) -> list[torch.Tensor]:
    """The losses of a step, its gradients and the parameters after it."""
    if "fail" in unusual:
        fail_midway(prepared)
    losses = []
    micro_batches = 2 if "accumulate" in prepared.words else 1
    with ExitStack() as stack:
        if "skip" in unusual:
            stack.enter_context(layers(prepared, [0, 2]))
        if "twice" in unusual:
            stack.enter_context(layers(prepared, [0, 1, 0, 2]))
        for index in range(micro_batches):
            loss = loss_of(prepared, 10 * step + index)
            prepared.ranks.begin_backward(last=index == micro_batches - 1)
            loss.backward()
            losses.append(loss.detach().clone())
            if "peek" in unusual:
                with torch.no_grad():
                    losses.append(loss_of(prepared, 99))
    prepared.ranks.finish_gradients()
    return [*losses, *descend(prepared)]


class layers(ExitStack):  # noqa: N801  # a context manager
    """The decoder has these of its layers, in this order, inside."""

    def __init__(self, prepared: Run, order: list[int]) -> None:
        super().__init__()
        decoder: Any = prepared.model.model
        plain = decoder.layers
        decoder.layers = nn.ModuleList(plain[index] for index in order)
        decoder.config.num_hidden_layers = len(order)
        self.callback(setattr, decoder, "layers", plain)
        self.callback(setattr, decoder.config, "num_hidden_layers", len(plain))


def loss_of(prepared: Run, seed: int) -> torch.Tensor:
    rank = 0 if prepared.fake else dist.get_rank()
    generator = torch.Generator().manual_seed(2 * seed + rank)
    ids = torch.zeros((2, 11), dtype=torch.long)
    if not prepared.fake:
        ids = torch.randint(3, VOCABULARY, ids.shape, generator=generator)
    loss: torch.Tensor = prepared.root(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@torch.no_grad()
def descend(prepared: Run) -> list[torch.Tensor]:
    """Gradient descent where parameters live; this rank's gradients and parameters."""
    if prepared.stream is not None:
        prepared.stream.release()
    numbers = []
    for parameter in prepared.root.parameters():
        at_home = None if prepared.stream is None else prepared.stream.host_values(parameter)
        values = local_part(parameter).data if at_home is None else at_home
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            values.sub_(gradient, alpha=0.1)
            numbers.append(gradient.clone())
            parameter.grad = None
        numbers.append(values.clone())
    return [number.float() for number in numbers]


def fail_midway(prepared: Run) -> None:
    """A backward that ends with an error at the middle layer, on all ranks."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("as planned")

    def leave(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = decoder_layers(prepared.model)[1].register_forward_hook(leave)
    loss = loss_of(prepared, 7)
    prepared.ranks.begin_backward(last=True)
    try:
        loss.backward()
    except ValueError:
        prepared.ranks.discard_gradients()
        for parameter in prepared.root.parameters():
            parameter.grad = None
    handle.remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
