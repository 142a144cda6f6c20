"""Every placement trains as the resident run does, bit for bit, with copies as late as they may be.

`PostponedTransfer` fills what is on its way with NaN until somebody waits for it, so a wait that is
missing anywhere is a different number here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.postponed import PostponedTransfer
from torch import nn

from tightfit.engine import activations, apply
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.engine.supported import engine_lacks
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    Tier,
)

Make = Callable[..., Any]
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
STEPS = 20
AWAY = PlacementPolicy(HOST, HOST, HOST)
PLACEMENTS = {
    "states": PlacementPolicy(HOST, HOST),
    "states of some": PlacementPolicy(HOST, HOST, optimizer_fraction=0.5, lazy_step=True),
    "gradients late": PlacementPolicy(DEVICE, HOST, lazy_step=True),
    "all on host": replace(AWAY, activations=HOST, lazy_step=True),
    "all on host, nothing ahead": replace(AWAY, activations=HOST, prefetch=0),
    "some parameters": replace(AWAY, parameter_fraction=0.4, prefetch=2, lazy_step=True),
    "nvme": PlacementPolicy(HOST, NVME, lazy_step=True),
    "all on nvme": PlacementPolicy(NVME, NVME, HOST, HOST, lazy_step=True),
    "parameters on nvme": PlacementPolicy(NVME, NVME, NVME, lazy_step=True),
    "parameters on nvme, at once": PlacementPolicy(HOST, NVME, NVME, HOST, prefetch=2),
    "some parameters on nvme": PlacementPolicy(
        HOST, NVME, NVME, parameter_fraction=0.4, prefetch=0, lazy_step=True
    ),
    "only parameters on nvme": PlacementPolicy(HOST, HOST, NVME, HOST, lazy_step=True),
    "some parameters on nvme, states on host": PlacementPolicy(
        DEVICE, HOST, NVME, parameter_fraction=0.4
    ),
}
OPTIMIZERS = {
    name: OptimizerPolicy(name, learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.7)
    for name in OptimizerName
}
ADAPTERS = {"full": None, "lora": AdapterPolicy(rank=2)}
LONG = {"hidden_size": 64, "num_hidden_layers": 3}  # matrices of 4096 values: 8-bit states


@pytest.fixture(autouse=True)
def postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "Transfer", PostponedTransfer)
    monkeypatch.setattr(
        activations, "SMALLEST_LEAVING_BYTES", 1
    )  # else nothing of a tiny model leaves


@pytest.fixture
def run(make_model: Make, make_batch: Make, tmp_path: Path) -> Callable[..., list[Any]]:
    """Losses, norms and parameters of a run; what a model's forward is may be changed first."""

    def run(
        policies: Policies,
        steps: int = STEPS,
        change: Callable[[nn.Module, int], None] | None = None,
        **sizes: Any,
    ) -> list[Any]:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[policies.precision.parameters]
        torch.manual_seed(1)  # adapters begin at random
        engine = fit(make_model(dtype, **sizes), policies, offload_folder=tmp_path)
        seen: list[Any] = []
        pieces = policies.batch.accumulation_steps
        for step in range(steps):
            if change is not None:
                change(engine.model, step)
            for piece in range(pieces):
                ids, labels = make_batch(10 * step + piece, batch_size=2)
                loss = engine.loss(ids, labels, 30 * pieces)
                engine.backward(loss)
                seen.append(float(loss.detach()))
            seen.append(engine.step())
        engine.drain()
        return [seen, *parameters(engine)]

    return run


def parameters(engine: Engine) -> Iterator[torch.Tensor]:
    state = engine.model.state_dict()
    yield from (state[name] for name in sorted(state))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == expected[0]
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one, other)


def possible(placement: str, optimizer: OptimizerName, adapter: str = "full") -> bool:
    """Whether the engine can do it."""
    policies = Policies(
        optimizer=OPTIMIZERS[optimizer],
        placement=PLACEMENTS[placement],
        adapter=ADAPTERS[adapter],
    )
    return not any(engine_lacks(policies))


# Each placement with AdamW and with one other optimizer in turn; all combinations are in
# benchmarks/placement_equal.py.
OTHERS = [name for name in OPTIMIZERS if name is not OptimizerName.ADAMW]
CASES = [
    (placement, optimizer, (1, 3)[number % 2], ("full", "lora")[(number + other) % 2])
    for number, placement in enumerate(PLACEMENTS)
    for other, optimizer in enumerate([OptimizerName.ADAMW, OTHERS[number % len(OTHERS)]])
    if possible(placement, optimizer)
]


@pytest.mark.parametrize(("placement", "optimizer", "accumulation", "adapter"), CASES)
def test_a_placement_changes_nothing(
    run: Make, placement: str, optimizer: OptimizerName, accumulation: int, adapter: str
) -> None:
    resident = Policies(
        optimizer=OPTIMIZERS[optimizer],
        adapter=ADAPTERS[adapter],
        batch=BatchPolicy(2, accumulation),
    )
    placed = replace(resident, placement=PLACEMENTS[placement])
    assert_same(run(placed, steps=3, **LONG), run(resident, steps=3, **LONG))


@pytest.fixture(scope="module")
def resident_runs() -> dict[Policies, list[Any]]:
    """What was run before."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_combination_changes_anything(
    run: Make,
    resident_runs: dict[Policies, list[Any]],
    placement: str,
    optimizer: OptimizerName,
    accumulation: int,
    adapter: str,
) -> None:
    """All of them, for `benchmarks/placement_equal.py`."""
    if not possible(placement, optimizer, adapter):
        pytest.skip("refused")
    resident = Policies(
        optimizer=OPTIMIZERS[optimizer],
        adapter=ADAPTERS[adapter],
        batch=BatchPolicy(2, accumulation),
    )
    if resident not in resident_runs:
        resident_runs[resident] = run(resident, **LONG)
    placed = replace(resident, placement=PLACEMENTS[placement])
    assert_same(run(placed, **LONG), resident_runs[resident])


@pytest.mark.parametrize("placement", ["all on host", "parameters on nvme"])
def test_what_is_away_reads_as_nan_and_state_dicts_have_the_values(
    make_model: Make, make_batch: Make, tmp_path: Path, placement: str
) -> None:
    engine = fit(make_model(), Policies(placement=PLACEMENTS[placement]), offload_folder=tmp_path)
    ids, labels = make_batch(0)
    for _ in range(2):
        engine.backward(engine.loss(ids, labels, 40))
        engine.step()
        for parameter in engine.model.parameters():
            assert bool(parameter.detach().isnan().all())
        assert all(bool(t.isfinite().all()) for t in engine.model.state_dict().values())
    engine.evaluation_loss(ids, labels)
    assert all(bool(p.detach().isnan().all()) for p in engine.model.parameters())
