"""The engine on a card: same bits in every placement, and the ledger beside the allocator."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.bill.table import Kind, Phase
from tightfit.dry_run import dry_run
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.facts.workload import Workload
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HOST = PlacementPolicy(Tier.HOST, Tier.HOST)
OPTIMIZER = OptimizerPolicy(learning_rate=1e-3, weight_decay=0.1)
BLOCK_BYTES = 512  # torch's caching allocator rounds every allocation up to this


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's gradient is summed with atomics otherwise."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def make_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).to("cuda", dtype)  # type: ignore[arg-type]
    return model


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 2048, (2, 64), generator=generator).to("cuda")


def train(engine: Engine, steps: int = 5) -> list[float]:
    norms = []
    for step in range(steps):
        for piece in range(2):
            ids = batch(2 * step + piece)
            engine.backward(engine.loss(ids, ids, 2 * ids.numel()))
        norms.append(engine.step())
    return norms


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_placement_changes_little_more_than_rounding(dtype: str, checkpointing: bool) -> None:
    """The device's and the host's fused AdamW are two kernels: fp32 results differ by units in
    the last place, and the gradients' norms of five steps by no more than 1e-3 of themselves."""
    results = []
    for placement in (PlacementPolicy(), HOST):
        policies = Policies(
            placement=placement,
            checkpointing=CheckpointingPolicy(checkpointing),
            optimizer=OPTIMIZER,
            precision=PrecisionPolicy(dtype),
        )
        width = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        engine = fit(make_model(width), policies)
        norms = train(engine)
        results.append((norms, [p.detach().float().cpu() for p in engine.model.parameters()]))
    (device_norms, device), (host_norms, host) = results
    assert host_norms == pytest.approx(device_norms, rel=1e-3 if dtype == "fp32" else 2e-2)
    for a, b in zip(device, host, strict=True):
        difference = (a - b).abs()
        # AdamW moves each weight by at most the learning rate per step.
        assert float(difference.mean()) < (1e-6 if dtype == "fp32" else 1e-3)
        assert float(difference.max()) <= 2 * 5 * OPTIMIZER.learning_rate + 2**-7


def test_host_placement_is_repeatable() -> None:
    """A missing wait between the copies' stream and the others shows as two different runs."""
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            engine = fit(make_model(), Policies(placement=HOST, optimizer=OPTIMIZER))
            norms = train(engine)
            runs.append((norms, [p.detach().cpu() for p in engine.model.parameters()]))
    finally:
        torch.use_deterministic_algorithms(False)
    for norms, parameters in runs[1:]:
        assert norms == runs[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, runs[0][1], strict=True))


@pytest.mark.parametrize(
    "policies",
    [
        Policies(),
        Policies(checkpointing=CheckpointingPolicy(True)),
        Policies(loss=LossPolicy(LossKind.CHUNKED, 50)),
        Policies(placement=HOST),
        Policies(adapter=AdapterPolicy(rank=4)),
    ],
    ids=["plain", "checkpointing", "chunked", "host", "lora"],
)
def test_the_ledger_agrees_with_the_allocator(policies: Policies) -> None:
    """Within one block for each live storage, and what kernels take inside themselves, which the
    ledger does not see: here below 5% and cuBLAS' workspaces, made before."""
    train(fit(make_model(), policies), steps=1)  # workspaces and lazily loaded kernels
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with Ledger(torch.device("cuda")) as counting:
        model = make_model()
        counting.adopt(model)
        engine = fit(model, policies)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        train(engine, steps=2)
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - before
    counted = max(
        counting.table().phase_peak_bytes(phase, Tier.DEVICE)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
    )
    live = 4 * 60 + 300  # storages at the peak, generously
    assert counted <= measured + BLOCK_BYTES
    assert measured <= counted * 1.05 + live * BLOCK_BYTES


def test_host_states_are_page_locked_where_they_travel() -> None:
    with Ledger(torch.device("cuda")) as counting:
        engine = fit(make_model(), Policies(placement=HOST))
    assert counting.kinds(Tier.PINNED).keys() == {Kind.GRADIENTS, Kind.MASTER_WEIGHTS}
    assert counting.kinds(Tier.HOST).keys() >= {Kind.OPTIMIZER_STATES}
    for state in engine.optimizer.state.values():
        assert state["master"].is_pinned()


def test_a_dry_run_on_the_cpu_is_close_to_the_card() -> None:
    """Attention's kernel is another one on the card, so this one has a tolerance."""
    config = make_model().config
    predicted = dry_run(config, Policies(), Workload(64, 2)).table.peak_bytes(Tier.DEVICE)
    with Ledger(torch.device("cuda")) as counting:
        model = make_model()
        counting.adopt(model)
        train(fit(model, Policies()), steps=1)
    assert predicted == pytest.approx(counting.peak_bytes(Tier.DEVICE), rel=0.25)
