"""Gradients on the host with copies that arrive as late as they may: when somebody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tightfit.engine import apply
from tightfit.engine.apply import fit
from tightfit.engine.transfer import Transfer
from tightfit.policies import OptimizerPolicy, PlacementPolicy, Policies, PrecisionPolicy, Tier

Make = Callable[..., Any]
OPTIMIZER = OptimizerPolicy(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.7)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LateTransfer(Transfer):
    """Copies nothing before `wait`, and sees that sources are as they were until then."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.most_waiting = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.waiting.append((destination, source, source.clone()))
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def wait(self) -> None:
        for destination, source, before in self.waiting:
            assert torch.equal(source, before), "a source was changed before its copy arrived"
            destination.copy_(source)
        self.waiting.clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_late_copies_change_nothing(
    make_model: Make,
    make_batch: Make,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    pieces: int,
) -> None:
    policies = Policies(
        placement=PlacementPolicy(Tier.HOST, Tier.HOST),
        optimizer=OPTIMIZER,
        precision=PrecisionPolicy(precision),
    )
    runs = []
    for kind in (Transfer, LateTransfer):
        monkeypatch.setattr(apply, "Transfer", kind)
        engine = fit(make_model(DTYPES[precision]), policies)
        norms = []
        for step in range(4):
            for piece in range(pieces):
                ids, labels = make_batch(10 * step + piece)
                engine.backward(engine.loss(ids, labels, 30 * pieces))
            norms.append(engine.step())
        runs.append((norms, [p.detach() for p in engine.model.parameters()]))
    (norms, parameters), (late_norms, late_parameters) = runs
    assert late_norms == norms
    assert all(torch.equal(a, b) for a, b in zip(late_parameters, parameters, strict=True))


@pytest.mark.parametrize("pieces", [1, 2])
def test_one_gradient_at_a_time_is_on_its_way(
    make_model: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """However slow the copies, the device holds one that leaves and one that is made."""
    made: list[LateTransfer] = []

    def make(device: torch.device) -> LateTransfer:
        made.append(LateTransfer(device))
        return made[0]

    monkeypatch.setattr(apply, "Transfer", make)
    engine = fit(make_model(), Policies(placement=PlacementPolicy(Tier.HOST, Tier.HOST)))
    made[0].most_waiting = 0
    for piece in range(pieces):
        ids, labels = make_batch(piece)
        engine.backward(engine.loss(ids, labels, 30))
    assert made[0].most_waiting == 1
