"""AdamW, Lion and SGD on flat fp32 tensors, without allocating any.

Element by element, so that a run of values gets what it would get as a part of the whole; to the
bit where runs begin at multiples of 16, since processors handle the last few values of a tensor by
other instructions. Knows nothing of formats or clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.policies import OptimizerName


@dataclass(frozen=True)
class Numbers:
    """A parameter group's, as they were when `step` was called; `epsilon` is AdamW's alone."""

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float


@dataclass(frozen=True)
class Wide:
    """fp32 tensors of one or several pieces.

    Attributes:
        weights, gradients: one for each piece, of the same sizes.
        moments: for each name, one for each piece.
        steps: for each piece the number of this step, if the optimizer counts.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    moments: list[list[Tensor]]
    steps: list[Tensor]


@dataclass(frozen=True)
class Arithmetic:
    """An optimizer in fp32.

    Attributes:
        moments: names of its states.
        counts: whether it needs the number of the step.
        spare: whether it works in a buffer, as large as the largest piece it is given.
        apply: changes weights and moments, and may change gradients; the last argument is the
            spare buffer.
    """

    moments: tuple[str, ...]
    counts: bool
    spare: bool
    apply: Callable[[Wide, Numbers, Tensor | None], None]


def adamw(wide: Wide, numbers: Numbers, spare: Tensor | None) -> None:
    """torch's fused AdamW (https://arxiv.org/abs/1711.05101)."""
    torch._fused_adamw_(
        wide.weights,
        wide.gradients,
        wide.moments[0],
        wide.moments[1],
        [],
        wide.steps,
        lr=numbers.learning_rate,
        beta1=numbers.betas[0],
        beta2=numbers.betas[1],
        weight_decay=numbers.weight_decay,
        eps=numbers.epsilon,
        amsgrad=False,
        maximize=False,
    )


def sgd(wide: Wide, numbers: Numbers, spare: Tensor | None) -> None:
    """torch's fused SGD without momentum; its weight decay is a part of the gradient."""
    torch._fused_sgd_(
        wide.weights,
        wide.gradients,
        [],
        weight_decay=numbers.weight_decay,
        momentum=0.0,
        lr=numbers.learning_rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def lion(wide: Wide, numbers: Numbers, spare: Tensor | None) -> None:
    """Lion (https://arxiv.org/abs/2302.06675, algorithm 2): decay apart from the gradient."""
    assert spare is not None
    near, far = numbers.betas
    for weight, gradient, moment in zip(wide.weights, wide.gradients, wide.moments[0], strict=True):
        direction = spare[: weight.numel()]
        torch.mul(moment, near, out=direction).add_(gradient, alpha=1 - near).sign_()
        weight.mul_(1 - numbers.learning_rate * numbers.weight_decay)
        weight.add_(direction, alpha=-numbers.learning_rate)
        moment.mul_(far).add_(gradient, alpha=1 - far)


_ADAMW = Arithmetic(("exp_avg", "exp_avg_sq"), counts=True, spare=False, apply=adamw)
_LION = Arithmetic(("exp_avg",), counts=False, spare=True, apply=lion)
_SGD = Arithmetic((), counts=False, spare=False, apply=sgd)

ARITHMETIC = {
    OptimizerName.ADAMW: _ADAMW,
    OptimizerName.ADAMW_8BIT: _ADAMW,
    OptimizerName.ADAMW_COMPACT: _ADAMW,
    OptimizerName.LION: _LION,
    OptimizerName.LION_8BIT: _LION,
    OptimizerName.SGD: _SGD,
}
