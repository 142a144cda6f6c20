"""Activations that leave a card and come back over slow roads: same bits, and memory is let go.

Every copy first poisons its destination and then waits on its stream, so that whoever does not wait
for it computes with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.engine import activations as module
from tightfit.engine.activations import ActivationOffload
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.saved import Travelling
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.engine.units import units_of
from tightfit.ledger import Ledger
from tightfit.policies import CheckpointingPolicy, PlacementPolicy, Tier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
SLOW_CYCLES = 3_000_000  # some milliseconds: longer than a layer of these models computes
BLOCK_BYTES = 512  # torch's caching allocator rounds every allocation up to this


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The embedding's gradient is summed with atomics otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(module, "SMALLEST_LEAVING_BYTES", 1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class SlowTransfer(Transfer):
    """Poisons on the copy's stream, then dawdles, then copies."""

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, ordered: bool = True
    ) -> Arrival:
        road = self._to_host if destination.device.type == "cpu" else self._to_device
        assert road is not None
        road._stream.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(road._stream):
            bad = float("nan") if destination.is_floating_point() else 1
            destination.copy_(torch.full_like(destination, bad, device=CUDA), non_blocking=True)
            torch.cuda._sleep(SLOW_CYCLES)
        return super().copy(destination, source, ordered=ordered)


def make_model(layers: int = 6, *, checkpointing: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",  # the others' backward sums with atomics
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).to(CUDA)  # type: ignore[arg-type]
    apply_checkpointing(model, CheckpointingPolicy(checkpointing))
    return model.train()


def offload(model: LlamaForCausalLM, transfer: Transfer, prefetch: int = 1) -> ActivationOffload:
    units = units_of(model, model, gathered=False)
    placement = PlacementPolicy(activations=Tier.HOST, prefetch=prefetch)
    offloading = ActivationOffload(model, units, placement, transfer)
    for unit in units:
        unit.watch()
    return offloading


def train(model: LlamaForCausalLM, micro_batches: int = 4) -> list[torch.Tensor]:
    """The host stays ahead of the card: nothing is read before the end."""
    for seed in range(micro_batches):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 512, (2, 64), generator=generator).to(CUDA)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_same_bits_over_slow_roads(checkpointing: bool, prefetch: int) -> None:
    expected = train(make_model(checkpointing=checkpointing))
    model = make_model(checkpointing=checkpointing)
    buffers = offload(model, SlowTransfer(CUDA), prefetch).buffers
    found = train(model)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert buffers.held_bytes
    assert buffers.lent_bytes == 0


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests could fail."""

    def flat(travelling: Travelling) -> torch.Tensor:
        assert travelling._here is not None
        return travelling._here[0]

    monkeypatch.setattr(Travelling, "flat", flat)
    model = make_model()
    offload(model, SlowTransfer(CUDA))
    assert any(gradient.isnan().any() for gradient in train(model))


def test_buffers_are_page_locked_from_the_second_micro_batch() -> None:
    model = make_model()
    buffers = offload(model, Transfer(CUDA)).buffers
    locked = []
    for _ in range(2):
        train(model, micro_batches=1)
        buffer = buffers.lend(1)
        locked.append(buffer.memory.is_pinned())
        buffers.give_back(buffer)
    assert locked == [False, True]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_card_holds_what_the_ledger_says(prefetch: int) -> None:
    """However far the host is ahead, and however slow the roads are: copies are waited for on the
    stream before memory is used again. Kernels' own temporaries, which the ledger does not see,
    are below 5%."""
    train(make_model(), micro_batches=1)  # workspaces and lazily loaded kernels
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make_model(layers=12)
    # Poison is memory of its own, so this one only dawdles.
    transfer = Transfer(CUDA)
    for road in (transfer._to_host, transfer._to_device):
        assert road is not None
        with torch.cuda.stream(road._stream):
            torch.cuda._sleep(50 * SLOW_CYCLES)
    offload(model, transfer, prefetch)
    torch.cuda.reset_peak_memory_stats()
    with Ledger(CUDA) as counting:
        counting.adopt(model)
        train(model)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    counted = counting.peak_bytes(Tier.DEVICE)
    live = 12 * 30 + 300  # storages at the peak, generously
    assert counted <= measured + BLOCK_BYTES
    assert measured <= counted * 1.05 + live * BLOCK_BYTES
