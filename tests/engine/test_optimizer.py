"""16-bit parameters with an fp32 master, against the same arithmetic written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.conftest import VOCABULARY
from tests.engine.stepping import norms_of_steps
from torch import nn
from transformers import get_scheduler

from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError
from tightfit.ledger import Ledger
from tightfit.policies import (
    LossKind,
    LossPolicy,
    Master,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    Tier,
)

Make = Callable[..., Any]
HOST = PlacementPolicy(Tier.HOST, Tier.HOST)
OPTIMIZER = OptimizerPolicy(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.7)
BF16 = PrecisionPolicy("bf16")
AWAY = PlacementPolicy(Tier.HOST, Tier.HOST, Tier.HOST)
COMPACT = replace(OPTIMIZER, name=OptimizerName.ADAMW_COMPACT, master=Master.SPLIT_8)


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_bf16_with_an_fp32_master(
    make_model: Make,
    make_batch: Make,
    plain_optimizer: Make,
    placement: PlacementPolicy,
    accumulation_steps: int,
) -> None:
    """Bit for bit: gradients widened, clipped by their fp32 norm, applied to the master, rounded.

    The master is a second model in fp32 that never computes. Norms are compared to 1e-6, since
    their sums are fp32 sums in another order; parameters exactly.
    """
    model, master = make_model(torch.bfloat16), make_model(torch.bfloat16).float()
    optimizer = plain_optimizer(master, OPTIMIZER)
    policies = Policies(precision=BF16, placement=placement, optimizer=OPTIMIZER)
    engine = fit(make_model(torch.bfloat16), policies)
    for step in range(5):
        for piece in range(accumulation_steps):
            ids, labels = make_batch(10 * step + piece, batch_size=2)
            model(input_ids=ids, labels=labels, num_items_in_batch=30).loss.backward()
            engine.backward(engine.loss(ids, labels, 30))
        for wide, narrow in zip(master.parameters(), model.parameters(), strict=True):
            wide.grad = narrow.grad.float()
            narrow.grad = None
        norm = float(nn.utils.clip_grad_norm_(master.parameters(), OPTIMIZER.max_grad_norm))
        optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(master.parameters(), model.parameters(), strict=True):
                narrow.copy_(wide)
        assert engine.step() == pytest.approx(norm, rel=1e-6)
        found = dict(engine.model.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter), (step, name)


def test_small_updates_are_not_lost_in_16_bits(make_model: Make, make_batch: Make) -> None:
    """One step changes bf16 weights of 1 by less than they can show; the master keeps it."""
    policy = OptimizerPolicy(learning_rate=1e-4)
    engine = fit(make_model(torch.bfloat16), Policies(precision=BF16, optimizer=policy))
    norm_weight = engine.model.model.norm.weight  # type: ignore[union-attr]
    for seed in range(60):
        ids, labels = make_batch(0)
        engine.backward(engine.loss(ids, labels, 30))
        engine.step()
        if seed == 0:
            assert torch.equal(norm_weight, torch.ones_like(norm_weight))  # type: ignore[arg-type]
    assert not torch.equal(norm_weight, torch.ones_like(norm_weight))  # type: ignore[arg-type]


def test_chunked_loss_trains_in_bf16(make_model: Make, make_batch: Make) -> None:
    losses = {}
    for kind in LossKind:
        policies = Policies(precision=BF16, optimizer=OPTIMIZER, loss=LossPolicy(kind, 5))
        engine = fit(make_model(torch.bfloat16), policies)
        losses[kind] = []
        for _ in range(6):
            ids, labels = make_batch(0)
            loss = engine.loss(ids, labels, 30)
            engine.backward(loss)
            losses[kind].append(loss.item())
            engine.step()
    # bf16 has 8 bits; six steps from the same start stay within one of them.
    assert losses[LossKind.CHUNKED] == pytest.approx(losses[LossKind.FULL], rel=2**-7)
    assert losses[LossKind.CHUNKED][-1] < losses[LossKind.CHUNKED][0]


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_a_schedule_sets_the_learning_rate(
    make_model: Make, make_batch: Make, plain_optimizer: Make, placement: PlacementPolicy
) -> None:
    plain = make_model()
    optimizer = plain_optimizer(plain, OPTIMIZER)
    engine = fit(make_model(), Policies(optimizer=OPTIMIZER, placement=placement))
    schedules = [
        get_scheduler("cosine", each, num_warmup_steps=2, num_training_steps=6)
        for each in (optimizer, engine.optimizer)
    ]
    for seed in range(6):
        ids, labels = make_batch(seed)
        plain(input_ids=ids, labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine.model(input_ids=ids, labels=labels).loss)
        engine.step()
        for schedule in schedules:
            schedule.step()
    found = dict(engine.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_states_are_complete_before_the_first_step(make_model: Make) -> None:
    engine = fit(make_model(torch.bfloat16), Policies(precision=BF16, placement=HOST))
    for parameter in engine.model.parameters():
        state = engine.optimizer.state[parameter]
        assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(
            ("master", "step", "exp_avg", "exp_avg_sq"), torch.float32
        )
        assert torch.equal(state["master"], parameter.float())


def test_masters_follow_parameters_that_are_loaded(make_model: Make) -> None:
    engine = fit(make_model(), Policies(placement=HOST))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(3)
    engine.optimizer.refresh_masters()
    assert all(bool((state["master"] == 3).all()) for state in engine.optimizer.state.values())


def test_a_step_without_gradients_does_nothing(make_model: Make) -> None:
    engine = fit(make_model(), Policies(placement=HOST))
    assert engine.step() == 0
    assert all(float(state["step"]) == 0 for state in engine.optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("saved_on", [PlacementPolicy(), HOST], ids=["device", "host"])
@pytest.mark.parametrize("loaded_on", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_states_go_on_where_they_were_saved(
    make_model: Make,
    make_batch: Make,
    dtype: torch.dtype,
    saved_on: PlacementPolicy,
    loaded_on: PlacementPolicy,
) -> None:
    """As with any optimizer of torch: state_dict, load_state_dict, and the same bits follow."""

    def fitted(placement: PlacementPolicy) -> Engine:
        precision = PrecisionPolicy("fp32" if dtype is torch.float32 else "bf16")
        policies = Policies(precision=precision, placement=placement, optimizer=OPTIMIZER)
        return fit(make_model(dtype), policies)

    def steps(engine: Engine, seeds: range) -> list[float]:
        return norms_of_steps(engine, make_batch, seeds)

    engine, fresh = fitted(saved_on), fitted(loaded_on)
    steps(engine, range(3))
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    fresh.model.load_state_dict(engine.model.state_dict())
    kept = [tensor for state in fresh.optimizer.state.values() for tensor in state.values()]
    types = [tensor.dtype for tensor in kept]
    fresh.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    held = [tensor for state in fresh.optimizer.state.values() for tensor in state.values()]
    assert all(a is b for a, b in zip(kept, held, strict=True)), "in place, on their tier"
    assert [tensor.dtype for tensor in held] == types
    assert steps(fresh, range(3, 6)) == steps(engine, range(3, 6))
    pairs = zip(fresh.model.parameters(), engine.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_compact_optimizer_takes_seven_bytes_per_parameter(
    make_model: Make, make_batch: Make
) -> None:
    """And the scales of its blocks: an fp32 of each moment for 256 values, 1/32 byte. Vectors have
    2 bytes of a remainder and, below 4096 values, 4 bytes of each moment."""
    model = make_model(torch.bfloat16, hidden_size=64, intermediate_size=128, vocab_size=128)
    policies = Policies(precision=BF16, optimizer=COMPACT)
    with Ledger() as counting:
        counting.adopt(model)
        engine = fit(model, policies)
        ids, labels = make_batch(0)
        engine.backward(engine.loss(ids, labels, 30))
        kinds = counting.kinds(Tier.DEVICE)
        found = sum(
            kinds[kind] for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)
        )
        assert Kind.MASTER_WEIGHTS not in kinds
    matrices = [p for p in engine.model.parameters() if p.ndim == 2]
    vectors = [p for p in engine.model.parameters() if p.ndim < 2]
    large = sum(p.numel() for p in matrices if p.numel() >= 4096)
    small = sum(p.numel() for p in matrices) - large
    counters = 4 * (len(matrices) + len(vectors))
    rest = 13 * small + 14 * sum(p.numel() for p in vectors)
    assert found == large * (7 + 2 * 4 / 256) + rest + counters
    assert large > 0.8 * (large + small)


@pytest.mark.parametrize("loaded_on", [PlacementPolicy(), AWAY], ids=["device", "host"])
def test_the_compact_optimizer_goes_on_where_it_was_saved(
    make_model: Make, make_batch: Make, loaded_on: PlacementPolicy
) -> None:
    def fitted(placement: PlacementPolicy) -> Engine:
        model = make_model(torch.bfloat16, hidden_size=64)
        return fit(model, Policies(precision=BF16, optimizer=COMPACT, placement=placement))

    def steps(engine: Engine, seeds: range) -> list[float]:
        return norms_of_steps(engine, make_batch, seeds)

    engine, fresh = fitted(PlacementPolicy()), fitted(loaded_on)
    steps(engine, range(3))
    fresh.model.load_state_dict(engine.model.state_dict())
    fresh.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    assert steps(fresh, range(3, 6)) == steps(engine, range(3, 6))
    found, expected = fresh.model.state_dict(), engine.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("other", [OptimizerName.ADAMW, OptimizerName.ADAMW_8BIT])
def test_states_of_another_format_are_refused(make_model: Make, other: OptimizerName) -> None:
    def fitted(policy: OptimizerPolicy) -> Engine:
        policies = Policies(precision=BF16, optimizer=policy)
        return fit(make_model(torch.bfloat16, hidden_size=64), policies)

    saved = fitted(replace(COMPACT, name=other)).optimizer.state_dict()
    with pytest.raises(ConfigError, match="another model, method or optimizer"):
        fitted(COMPACT).optimizer.load_state_dict(saved)
    saved = fitted(replace(COMPACT, master=Master.SPLIT)).optimizer.state_dict()
    with pytest.raises(ConfigError, match="another model, method or optimizer"):
        fitted(COMPACT).optimizer.load_state_dict(saved)


@pytest.mark.slow
def test_the_compact_optimizer_learns_as_fp32_does(make_model: Make) -> None:
    """The losses of 200 steps on a language of one rule: they end within 1% of fp32 AdamW's, which
    16-bit parameters alone are off by as well."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}

    def losses(policy: OptimizerPolicy, precision: PrecisionPolicy) -> torch.Tensor:
        dtype = torch.float32 if precision.parameters == "fp32" else torch.bfloat16
        engine = fit(make_model(dtype, **sizes), Policies(optimizer=policy, precision=precision))
        generator = torch.Generator().manual_seed(0)
        following = torch.randperm(VOCABULARY, generator=generator)
        found = []
        for step in range(200):
            ids = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
            for _ in range(15):
                noise = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
                kept = torch.rand(4, 1, generator=generator) < 0.8
                ids = torch.cat([ids, torch.where(kept, following[ids[:, -1:]], noise)], 1)
            engine.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 200)
            loss = engine.loss(ids, ids, 60)
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        return torch.tensor(found)

    adamw = OptimizerPolicy(learning_rate=1e-3)
    wide = losses(adamw, PrecisionPolicy())
    compact = losses(
        replace(COMPACT, learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1.0), BF16
    )
    assert wide[-50:].mean() < 0.6 * wide[0]
    assert float((compact - wide).abs().mean() / wide.mean()) < 0.01
    assert abs(float(compact[-50:].mean() / wide[-50:].mean()) - 1) < 0.01


def test_states_of_another_model_are_refused(make_model: Make) -> None:
    saved = fit(make_model(hidden_size=32), Policies()).optimizer.state_dict()
    engine = fit(make_model(), Policies())
    with pytest.raises(ConfigError, match="another model, method or optimizer"):
        engine.optimizer.load_state_dict(saved)
    saved = fit(make_model(tie_word_embeddings=False), Policies()).optimizer.state_dict()
    with pytest.raises(ConfigError, match="another model, method or optimizer"):
        engine.optimizer.load_state_dict(saved)
