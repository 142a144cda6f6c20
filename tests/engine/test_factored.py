"""Adafactor beside that of transformers, which `optim: adafactor` means there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.stepping import norms_of_steps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.optimization import Adafactor

from tightfit.bill.optimizers import moment_bytes
from tightfit.bill.table import Phase
from tightfit.engine import factored
from tightfit.engine.apply import fit
from tightfit.engine.arithmetic import Numbers
from tightfit.engine.engine import Engine
from tightfit.engine.rule_of import rule_of
from tightfit.engine.rules import Piece
from tightfit.errors import UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import (
    Master,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    ShardingPolicy,
    Tier,
)

Make = Callable[..., Any]
BF16 = torch.bfloat16
SHAPES = ((300,), (1,), (40, 17), (7, 1), (1, 7), (1000, 600), (3, 20, 11))
NUMBERS = Numbers(3e-3, 0.1, (0.9, 0.99), 1e-8)
ADAFACTOR = OptimizerPolicy(OptimizerName.ADAFACTOR, 3e-3, 0.1, max_grad_norm=0.7)
HOST, NVME = Tier.HOST, Tier.NVME


class Run:
    """Parameters of some shapes and their steps, of one rule."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        master: Master = Master.FP32,
    ) -> None:
        self.rule = rule_of(OptimizerPolicy(OptimizerName.ADAFACTOR, master=master))
        generator = torch.Generator().manual_seed(1)
        start = [torch.randn(shape, generator=generator).to(dtype).float() for shape in shapes]
        self.pieces = [
            self._piece(weight, dtype, split=master is not Master.FP32) for weight in start
        ]
        largest = max(weight.numel() for weight in start)
        memory = torch.full((self.rule.scratch_values(largest, dtype),), float("nan"))
        self.scratch = self.rule.scratch(memory, dtype)

    def _piece(self, weight: torch.Tensor, dtype: torch.dtype, *, split: bool) -> Piece:
        states = {
            name: torch.empty(count, dtype=kind)
            for name, (count, kind) in self.rule.states(weight.shape).items()
        }
        self.rule.initialise(states)
        flat = weight.view(-1)
        narrow = None if dtype is torch.float32 else flat.to(dtype)
        return Piece(None if split else flat, torch.empty(0), states, torch.zeros(()), narrow)

    def step(self, gradients: Sequence[torch.Tensor], clip: torch.Tensor | None = None) -> None:
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            piece.gradient = gradient.reshape(-1).clone()
            assert piece.step is not None
            piece.step += 1
        self.rule.update(self.pieces, NUMBERS, clip, self.scratch)


def gradients_of(
    seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) ** 3 * 1e-2).to(dtype) for s in shapes]


def theirs(weights: list[nn.Parameter]) -> Adafactor:
    """As transformers' Trainer makes it."""
    rate, decay = NUMBERS.learning_rate, NUMBERS.weight_decay
    return Adafactor(
        weights, lr=rate, weight_decay=decay, scale_parameter=False, relative_step=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_it_is_that_of_transformers(dtype: torch.dtype) -> None:
    """After 20 steps within 3e-5 of the way walked, which is what rounding weights of 1 leaves; of
    a 16-bit parameter its master. The largest matrix is gone through in three runs of rows."""
    run = Run(dtype=dtype)
    plain = [
        nn.Parameter(piece.weight.clone().view(shape))  # type: ignore[union-attr]
        for piece, shape in zip(run.pieces, SHAPES, strict=True)
    ]
    start = [parameter.detach().clone().view(-1) for parameter in plain]
    optimizer = theirs(plain)
    clip = torch.tensor(0.37)
    for seed in range(20):
        gradients = gradients_of(seed, dtype=dtype)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient.float() * clip
        optimizer.step()
        run.step(gradients, clip)
    for piece, parameter, begin in zip(run.pieces, plain, start, strict=True):
        found, expected = piece.weight, parameter.detach().view(-1)
        assert found is not None
        assert (found - expected).norm() < 3e-5 * (expected - begin).norm()
        assert piece.narrow is None or torch.equal(piece.narrow.float(), found.to(dtype).float())
        for name, state in optimizer.state[parameter].items():
            if name.startswith("exp_avg_sq"):
                torch.testing.assert_close(piece.states[name], state.view(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_those_of_the_bill(shape: tuple[int, ...]) -> None:
    states = rule_of(ADAFACTOR).states(shape)
    held = sum(count * dtype.itemsize for count, dtype in states.values())
    assert held == moment_bytes(shape, OptimizerName.ADAFACTOR)


def test_a_split_master_is_an_fp32_one_bit_for_bit() -> None:
    whole, split = Run(dtype=BF16), Run(dtype=BF16, master=Master.SPLIT)
    for seed in range(10):
        for run in (whole, split):
            run.step(gradients_of(seed, dtype=BF16))
    for one, other in zip(whole.pieces, split.pieces, strict=True):
        assert one.weight is not None
        assert other.narrow is not None
        upper = other.narrow.view(torch.int16).to(torch.int32) * 2**16
        joined = (upper + other.states["remainder"].to(torch.int32)).view(torch.float32)
        assert torch.equal(joined, one.weight)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_ledger_sees_no_memory_taken(fake: bool) -> None:
    def growth() -> int:
        with Ledger() as ledger:
            run = Run(((50, 100), (3, 4, 5)), BF16)
            run.pieces[0].gradient = torch.zeros(5000, dtype=BF16)
            run.pieces[1].gradient = torch.zeros(60, dtype=BF16)
            before = ledger.total_bytes(Tier.DEVICE)
            ledger.set_section(Phase.STEP)
            run.rule.update(run.pieces, NUMBERS, torch.tensor(0.5), run.scratch)
            return sum(ledger.sections()[Phase.STEP, ""][Tier.DEVICE].values()) - before

    if not fake:
        assert growth() <= 64
        return
    with FakeTensorMode():
        assert growth() <= 64


def test_a_row_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored, "CHUNK_VALUES", 10)
    with pytest.raises(UnsupportedError, match=r"rows of 11 values.*adamw_8bit"):
        rule_of(ADAFACTOR).states((3, 11))


@pytest.mark.parametrize("placement", [PlacementPolicy(), PlacementPolicy(HOST, HOST, HOST)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_goes_on_where_it_was_saved(
    make_model: Make, make_batch: Make, placement: PlacementPolicy, precision: str
) -> None:
    def fitted(placement: PlacementPolicy) -> Engine:
        model = make_model({"fp32": torch.float32, "bf16": BF16}[precision])
        types = PrecisionPolicy(precision)
        return fit(model, Policies(precision=types, optimizer=ADAFACTOR, placement=placement))

    def steps(engine: Engine, seeds: range) -> list[float]:
        return norms_of_steps(engine, make_batch, seeds)

    engine, fresh = fitted(PlacementPolicy()), fitted(placement)
    steps(engine, range(3))
    fresh.model.load_state_dict(engine.model.state_dict())
    fresh.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert steps(fresh, range(3, 6)) == steps(engine, range(3, 6))


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (Policies(sharding=ShardingPolicy(2, 3)), "zero_stage 3 .take zero_stage 0."),
        (Policies(sharding=ShardingPolicy(2, tensor_parallel=2)), "tensor_parallel_size 2 .take 1"),
        (Policies(placement=PlacementPolicy(HOST, NVME)), "offload_optimizer nvme .take cpu."),
        (Policies(placement=PlacementPolicy(HOST, HOST, NVME)), "offload_param nvme .take cpu."),
    ],
)
def test_what_needs_parts_of_parameters_is_refused(
    make_model: Make, policies: Policies, said: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"optim adafactor with {said}"):
        fit(make_model(), replace(policies, optimizer=ADAFACTOR))
