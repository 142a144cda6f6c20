"""Parameters that stream to a card: every copy is late and every freed block is poisoned first."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.bill.table import Kind
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.residency import Visitors
from tightfit.engine.slab import HostSlab
from tightfit.engine.streaming import ParameterStream
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.engine.units import Unit, units_of
from tightfit.ledger import Ledger
from tightfit.policies import CheckpointingPolicy, PlacementPolicy, Tier
from tightfit.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPIN_CYCLES = 2_000_000  # about a millisecond, more than a layer computes
LAYERS = 6


class LateTransfer(Transfer):
    """Destinations on the card hold NaN, in the compute stream's order, and copies begin late."""

    @torch.no_grad()
    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, ordered: bool = True
    ) -> Arrival:
        road = self._to_device
        if destination.is_cuda and road is not None:
            destination.fill_(float("nan"))
            with torch.cuda.stream(road._stream):
                torch.cuda._sleep(SPIN_CYCLES)
        return super().copy(destination, source, ordered=ordered)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given up holds NaN before anybody else gets it."""
    plain = Visitors.free

    @torch.no_grad()
    def free(visitors: Visitors) -> None:
        if visitors.are_here:
            visitors.order()
            for parameter in visitors.parameters:
                parameter.data.fill_(float("nan"))
        plain(visitors)

    monkeypatch.setattr(Visitors, "free", free)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_model(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).to("cuda")  # type: ignore[arg-type]
    return model


def stream(model: LlamaForCausalLM, prefetch: int, transfer: Transfer) -> list[Unit]:
    """Let the model's parameters stream; its units."""
    units = units_of(model, model, gathered=False)
    slab = HostSlab(transfer.device)
    placement = PlacementPolicy(parameters=Tier.HOST, prefetch=prefetch)
    streaming = ParameterStream(units, placement, transfer, slab)
    slab.allocate()
    streaming.adopt()
    for unit in units:
        unit.before_use.append(partial(streaming.use, unit))
        unit.watch()
    return units


def train(model: nn.Module, steps: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, and the gradients that add up."""
    losses = []
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 2048, (2, 64), generator=generator).to("cuda")
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def transfer_on_card(kind: type[Transfer] = Transfer) -> Transfer:
    return kind(torch.device("cuda"))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_same_bits_however_late_copies_come(
    prefetch: int, checkpointing: bool, tied: bool
) -> None:
    results = []
    for streams in (False, True):
        model = make_model(tied=tied).train()
        apply_checkpointing(model, CheckpointingPolicy(checkpointing))
        if streams:
            stream(model, prefetch, transfer_on_card(LateTransfer))
        results.append(train(model))
    for first, second in zip(*results, strict=True):
        for a, b in zip(first, second, strict=True):
            assert torch.isfinite(a).all()
            assert torch.equal(a, b)


def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Visitors, "order", lambda self: None)
    model = make_model()
    stream(model, 1, transfer_on_card(LateTransfer))
    losses, _ = train(model, steps=1)
    torch.cuda.synchronize()
    assert not torch.isfinite(losses[0])


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_allocator_sees_no_more_units_than_the_ledger(prefetch: int) -> None:
    """Also where the host runs ahead of the card: what is given up is used again at once."""
    counting = Ledger(torch.device("cuda"))
    with counting:
        model = make_model()
        counting.adopt(model)
        resident = torch.cuda.memory_allocated()
        units = stream(model, prefetch, transfer_on_card())
        assert Kind.PARAMETERS not in counting.kinds(Tier.DEVICE)
        assert counting.kinds(Tier.PINNED)[Kind.PARAMETERS] > 0
        sizes = [sum(p.numel() * p.element_size() for p in unit.parameters) for unit in units]
        assert torch.cuda.memory_allocated() <= resident - sum(sizes) + MIB
    with torch.no_grad():
        ids = torch.zeros((1, 8), dtype=torch.long, device="cuda")
        model(input_ids=ids, use_cache=False)  # workspaces and lazily loaded kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = resident - sum(sizes)
        for _ in range(4):
            model(input_ids=ids, use_cache=False)
        torch.cuda.synchronize()
    largest = max(sizes) * (1 + prefetch)
    assert torch.cuda.max_memory_allocated() - before <= largest + 4 * MIB
