"""Gradients on the host with copies that arrive as late as they may: when somebody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.postponed import PostponedTransfer

from tightfit.bill.table import Kind
from tightfit.engine import apply, gradients
from tightfit.engine.apply import fit
from tightfit.ledger import Ledger
from tightfit.policies import PlacementPolicy, Policies, Tier

Make = Callable[..., Any]
HOST = PlacementPolicy(Tier.HOST, Tier.HOST)


@pytest.mark.parametrize("pieces", [1, 2])
def test_one_gradient_at_a_time_is_on_its_way(
    make_model: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """However slow the copies, the device holds one that leaves and one that is made."""
    made: list[PostponedTransfer] = []

    def make(device: torch.device) -> PostponedTransfer:
        made.append(PostponedTransfer(device))
        return made[0]

    monkeypatch.setattr(apply, "Transfer", make)
    engine = fit(make_model(), Policies(placement=HOST))
    made[0].most_pending = 0
    for piece in range(pieces):
        ids, labels = make_batch(piece)
        engine.backward(engine.loss(ids, labels, 30))
    assert made[0].most_pending == 1


@pytest.mark.parametrize("landing_values", [5, 16, 10**6])
def test_a_second_micro_batch_lands_in_pieces_of_any_size(
    make_model: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, landing_values: int
) -> None:
    norms = []
    for size in (10**9, 4 * landing_values):
        monkeypatch.setattr(gradients, "_LANDING_BYTES", size)
        engine = fit(make_model(), Policies(placement=HOST))
        for piece in range(3):
            ids, labels = make_batch(piece)
            engine.backward(engine.loss(ids, labels, 90))
        norms.append(engine.step())
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    ("placement", "whole"), [(HOST, False), (PlacementPolicy(Tier.DEVICE, Tier.HOST), True)]
)
def test_gradients_add_up_where_the_plan_says(
    make_model: Make, make_batch: Make, placement: PlacementPolicy, whole: bool
) -> None:
    with Ledger() as counting:
        model = make_model()
        counting.adopt(model)
        engine = fit(model, Policies(placement=placement))
        everything = 4 * sum(p.numel() for p in model.parameters())
        ids, labels = make_batch(0)
        engine.backward(engine.loss(ids, labels, 30))
        on_device = counting.kinds(Tier.DEVICE).get(Kind.GRADIENTS, 0)
        assert on_device == (everything if whole else 0)
        engine.step()
        assert Kind.GRADIENTS not in counting.kinds(Tier.DEVICE)
        assert counting.kinds(Tier.HOST)[Kind.GRADIENTS] == everything
