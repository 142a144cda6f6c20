"""Gradients in fp16: the scale follows overflows as DeepSpeed's does and changes no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.compared_runs import check_parameters
from torch import nn
from transformers import LlamaForCausalLM

from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.engine.loss_scale import LossScale
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    LossScalePolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

Make = Callable[..., Any]
FP16 = PrecisionPolicy("fp16")
STEPS = 4
# Of steps of 1e-2; of slices 16-bit gradients of hidden states add up.
TOLERANCE = {LossKind.FULL: 1e-3, LossKind.CHUNKED: 1e-3, LossKind.SLICED: 3e-3}


@pytest.mark.parametrize(
    ("policy", "overflows", "scales"),
    [
        # The second overflow halves; then each does, as nothing has forgiven them yet.
        (LossScalePolicy(initial_power=4), "..xx.x", [16, 16, 16, 8, 8, 4]),
        (LossScalePolicy(initial_power=4, hysteresis=1), "xx.", [8, 4, 4]),
        # Three steps in a row double it, and forgive.
        (LossScalePolicy(initial_power=4, window=3), "x..x...xx", [16, 16, 16, 8, 8, 8, 16, 16, 8]),
        (LossScalePolicy(initial_power=1, hysteresis=1), "xxx.", [1, 1, 1, 1]),
        (LossScalePolicy(initial_power=3, hysteresis=1, minimum=4), "xx", [4, 4]),
        (LossScalePolicy(static=128, window=1), "x..x", [128, 128, 128, 128]),
    ],
)
def test_it_follows_overflows(policy: LossScalePolicy, overflows: str, scales: list[float]) -> None:
    scale = LossScale(policy)
    for overflow, expected in zip(overflows, scales, strict=True):
        scale.after_step(finite=overflow == ".")
        assert scale.value == expected
    assert scale.is_lowest == (bool(policy.static) or scale.value == policy.minimum)


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_one_that_is_loaded_goes_on_as_if_nothing_had_happened(
    before: list[bool], after: list[bool]
) -> None:
    policy = LossScalePolicy(initial_power=8, window=3, hysteresis=3)
    whole, first, second = (LossScale(policy) for _ in range(3))
    for finite in before:
        whole.after_step(finite=finite)
        first.after_step(finite=finite)
    second.load(first.state())
    for finite in after:
        whole.after_step(finite=finite)
        second.after_step(finite=finite)
    assert second.state() == whole.state()


LOSSES = [LossPolicy(), LossPolicy(LossKind.CHUNKED, 7), LossPolicy(LossKind.SLICED, slice_rows=9)]
AWAY = PlacementPolicy(*[Tier.HOST] * 4, lazy_step=True)
PLACEMENTS = [PlacementPolicy(), PlacementPolicy(Tier.HOST, Tier.HOST), AWAY]


def policies_of(scale: LossScalePolicy, **more: Any) -> Policies:
    optimizer = OptimizerPolicy(
        learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.7, loss_scale=scale
    )
    return Policies(precision=FP16, optimizer=optimizer, batch=BatchPolicy(2, 2), **more)


def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor], times: float = 1.0) -> float:
    """Two micro-batches of one; returns the norm."""
    tokens = int((batch[1][:, 1:] != -100).sum())
    for ids, labels in zip(*(part.split(2) for part in batch), strict=True):
        engine.backward(engine.loss(ids, labels, tokens) * times)
    return engine.step()


def by_hand(model: LlamaForCausalLM, batches: list[Any], scale: float) -> list[float]:
    """The recipe of mixed precision in plain torch, on fp32 masters; leaves the model trained."""
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    decayed = [m for m in masters if m.ndim > 1]
    plain = [m for m in masters if m.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    norms = []
    for ids, labels in batches:
        tokens = int((labels[:, 1:] != -100).sum())
        for part in zip(ids.split(2), labels.split(2), strict=True):
            found = model(
                input_ids=part[0], labels=part[1], num_items_in_batch=torch.tensor(tokens)
            )
            (found.loss * scale).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / scale
            parameter.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(masters, 0.7)))
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return norms


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["device", "states", "all"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.kind))
def test_it_trains_as_the_recipe_does(
    make_model: Make, make_batch: Make, loss: LossPolicy, placement: PlacementPolicy
) -> None:
    scale = LossScalePolicy(initial_power=10)
    model, plain = make_model(torch.float16), make_model(torch.float16)
    batches = [make_batch(seed) for seed in range(STEPS)]
    expected = by_hand(plain, batches, 2.0**10)
    engine = fit(model, policies_of(scale, loss=loss, placement=placement))
    norms = [step(engine, batch) for batch in batches]
    assert norms == pytest.approx(expected, rel=5e-3)  # fp16 keeps three digits
    assert max(norms) > 0.7, "something was clipped"
    parameters = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    engine.drain()
    state = engine.model.state_dict()
    check_parameters({name: state[name] for name in parameters}, parameters, TOLERANCE[loss.kind])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.kind))
@pytest.mark.parametrize("technique", [{}, {"adapter": AdapterPolicy(rank=2)},
                                       {"checkpointing": CheckpointingPolicy(True)}],
                         ids=["plain", "lora", "checkpointing"])  # fmt: skip
def test_small_gradients_do_not_vanish(
    make_model: Make, make_batch: Make, loss: LossPolicy, technique: dict[str, Any]
) -> None:
    """Of a loss times 1e-5 hardly anything is left in fp16, unless it is scaled."""
    norms = {}
    for power in (0, 16):
        engine = fit(
            make_model(torch.float16),
            policies_of(LossScalePolicy(initial_power=power), loss=loss, **technique),
        )
        norms[power] = step(engine, make_batch(0), 1e-5)
    full = step(
        fit(make_model(), Policies(batch=BatchPolicy(2, 2), loss=loss, **technique)), make_batch(0)
    )
    assert norms[16] == pytest.approx(1e-5 * full, rel=0.02)
    assert norms[0] < 0.9 * norms[16]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["device", "states", "all"])
def test_a_step_that_overflows_is_skipped_and_the_next_is_not(
    make_model: Make, make_batch: Make, placement: PlacementPolicy
) -> None:
    policy = LossScalePolicy(initial_power=30, hysteresis=1)
    engine = fit(make_model(torch.float16), policies_of(policy, placement=placement))
    assert engine.loss_scale is not None
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    skipped = 0
    while not math.isfinite(step(engine, make_batch(0))):
        skipped += 1
        assert engine.loss_scale.value == 2.0 ** (30 - skipped)
        state = engine.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert 5 < skipped < 25
    state = engine.model.state_dict()
    assert any(not torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_types_are_not_scaled(make_model: Make, precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    policies = Policies(precision=PrecisionPolicy(precision))
    assert fit(make_model(dtype), policies).loss_scale is None
