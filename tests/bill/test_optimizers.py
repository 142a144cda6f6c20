from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from tightfit.bill.optimizers import counter_bytes, moment_bytes, moments
from tightfit.policies import OptimizerName

SHAPES = [(300,), (7, 9), (64, 64), (100, 77), (3, 40, 50)]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def plain_adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


def of_bitsandbytes(name: str) -> MakeOptimizer:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        module = pytest.importorskip("bitsandbytes")
        optimizer: torch.optim.Optimizer = getattr(module.optim, name)(parameters)
        return optimizer

    return make


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "momentum", "make"),
    [
        (OptimizerName.ADAMW, False, torch.optim.AdamW),
        (OptimizerName.SGD, False, torch.optim.SGD),
        (OptimizerName.SGD, True, lambda p: torch.optim.SGD(p, momentum=0.9)),
        (OptimizerName.ADAFACTOR, False, plain_adafactor),
        (OptimizerName.ADAMW_8BIT, False, of_bitsandbytes("AdamW8bit")),
        (OptimizerName.LION, False, of_bitsandbytes("Lion32bit")),
        (OptimizerName.LION_8BIT, False, of_bitsandbytes("Lion8bit")),
    ],
    ids=["adamw", "sgd", "momentum", "adafactor", "adamw-8bit", "lion", "lion-8bit"],
)
def test_states_are_those_of_the_libraries(
    shape: tuple[int, ...], name: OptimizerName, momentum: bool, make: MakeOptimizer
) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = make([parameter])
    optimizer.step()
    # The tables of 8-bit optimizers are shared by all parameters; a lone scalar is no moment.
    counted = sum(
        value.untyped_storage().nbytes()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.ndim and not key.startswith("qmap")
    )
    assert moment_bytes(shape, name, momentum=momentum) == counted


def test_adamw_counts_steps_in_a_tensor() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    step = optimizer.state[parameter]["step"]
    assert counter_bytes(OptimizerName.ADAMW) == step.untyped_storage().nbytes()
    assert counter_bytes(OptimizerName.SGD) == 0


def test_moments_per_parameter() -> None:
    assert [moments(name) for name in OptimizerName] == [2, 2, 2, 1, 1, 0, 0]
    assert moments(OptimizerName.SGD, momentum=True) == 1


@pytest.mark.parametrize("name", OptimizerName)
def test_an_empty_shard_has_no_states(name: OptimizerName) -> None:
    assert moment_bytes((0, 8), name, momentum=True) == 0
