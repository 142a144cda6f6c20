"""How one module's forward runs where its parameters are divided among a tensor group's ranks.

The names are those of transformers' plans (`base_model_tp_plan`). A style says how each parameter
is cut, and what happens to inputs and outputs. Parameters are DTensors on the tensor mesh; inside a
forward a module sees its local parts as plain tensors, so that every kernel runs as ever.
Knows nothing of models and of how a module got its style.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tightfit.engine.collectives import enter, gathered, leave, own_part, own_range
from tightfit.engine.vocabulary import part_of


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided: along `dim`, each of `pieces` equal parts of it for itself."""

    dim: int
    pieces: int = 1


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Style:
    """Parameters that every rank has and uses alike, as of norms; the base of all others.

    Args:
        group: the ranks that share the module.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """How the module's own parameter is divided; None where each rank has all of it."""
        return None

    def prepare(self, module: nn.Module) -> None:
        """Change what the module keeps beside parameters, once and before they are divided."""

    def see(self, name: str, part: torch.Tensor) -> torch.Tensor | None:
        """What forward sees of a parameter of which this rank has `part`."""
        return part

    def before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """The arguments that the module gets."""
        return arguments

    def after(self, module: nn.Module, output: Any) -> Any:
        """What its caller gets."""
        return output


class PartialGradient(Style):
    """`replicated_with_grad_allreduce`: all have the parameter, each uses it for its own heads."""

    def see(self, name: str, part: torch.Tensor) -> torch.Tensor | None:
        """See `Style`."""
        return enter(part, self.group)


class Entrance:
    """Where several layers take the same whole input, so that its gradients are summed once.

    Args:
        around: the module that calls the layers; what was taken is forgotten with its return.
    """

    def __init__(self, around: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        around.register_forward_hook(self._forget, always_call=True)

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        """See `collectives.enter`."""
        if self._last is None or self._last[0] is not whole:
            self._last = whole, enter(whole, self._group)
        return self._last[1]

    def _forget(self, *unused: Any) -> None:
        self._last = None


class Columns(Style):
    """`colwise`: a linear layer of which each rank has some outputs.

    Args:
        entrance: shared with other layers of the same input.
        gathers: whether every rank gets all outputs (`colwise_gather_output`).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        entrance: Callable[[torch.Tensor], torch.Tensor],
        *,
        gathers: bool = False,
    ) -> None:
        super().__init__(group)
        self._entrance = entrance
        self._gathers = gathers
        self._width = 0

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """See `Style`."""
        return Cut(0)

    def prepare(self, module: nn.Module) -> None:
        """See `Style`."""
        assert isinstance(module, nn.Linear)
        self._width = module.out_features

    def before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """See `Style`."""
        (whole, *others), named = arguments
        return (self._entrance(whole), *others), named

    def after(self, module: nn.Module, output: Any) -> Any:
        """See `Style`."""
        if not self._gathers:
            return output
        return gathered(output, self._width, self.group)


class RepeatedColumns(Columns):
    """Keys or values of fewer heads than ranks: all have the layer, and use one head of it.

    Args:
        rows: of the weight, those of this rank's head.

    A frozen weight of 4 bits is not whole: each rank has its rows alone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        entrance: Callable[[torch.Tensor], torch.Tensor],
        rows: slice,
    ) -> None:
        super().__init__(group, entrance)
        self.rows = rows

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """See `Style`."""
        return None

    def see(self, name: str, part: torch.Tensor) -> torch.Tensor | None:
        """See `Style`."""
        return enter(part, self.group)[self.rows] if part.is_floating_point() else part


class Rows(Style):
    """`rowwise`: a linear layer of which each rank has some inputs; all get the sum of outputs.

    Args:
        splits: whether each rank is given all inputs (`rowwise_split_input`).
    """

    def __init__(self, group: dist.ProcessGroup, *, splits: bool = False) -> None:
        super().__init__(group)
        self._splits = splits

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """See `Style`."""
        return Cut(1) if name == "weight" else None

    def see(self, name: str, part: torch.Tensor) -> torch.Tensor | None:
        """See `Style`; a bias is added once, to the sum."""
        return None if name == "bias" else part

    def before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """See `Style`."""
        (inputs, *others), named = arguments
        if self._splits:
            inputs = own_part(enter(inputs, self.group), -1, self.group)
        return (inputs, *others), named

    def after(self, module: nn.Module, output: Any) -> Any:
        """See `Style`."""
        total = leave(output, self.group)
        bias = module._parameters.get("bias")
        return total if bias is None else total.add_(part_of(bias))


class EmbeddingRows(Style):
    """`embedding_rowwise`: each rank has a part of the vocabulary and gives zeros for others."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """See `Style`."""
        return Cut(0)

    def prepare(self, module: nn.Module) -> None:
        """See `Style`; the row of padding, which gets no gradient, is on one rank."""
        assert isinstance(module, nn.Embedding)
        first, size = own_range(module.num_embeddings, self.group.size(), self.group.rank())
        self._first, self._size = first, size
        if module.padding_idx is not None:
            here = first <= module.padding_idx < first + size
            module.padding_idx = module.padding_idx - first if here else None

    def before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """See `Style`."""
        (tokens, *others), named = arguments
        rows = tokens - self._first
        self._elsewhere = (rows < 0) | (rows >= self._size)
        return (rows.masked_fill_(self._elsewhere, 0), *others), named

    def after(self, module: nn.Module, output: Any) -> Any:
        """See `Style`."""
        elsewhere = self._elsewhere.unsqueeze(-1)
        del self._elsewhere
        return leave(output.masked_fill_(elsewhere, 0), self.group)


class Experts(Style):
    """`moe_tp_experts`: every rank has a part of every expert's inner width.

    Their output is a sum over ranks, and so are the gradients of what they are given: hidden states
    and the weights of the router's choice.
    """

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """See `Style`: gate and up are one matrix `[experts, 2 * inner, hidden]`, down is
        `[experts, hidden, inner]`."""
        return Cut(1, pieces=2) if name == "gate_up_proj" else Cut(2)

    def before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """See `Style`; floating point is what has a gradient."""
        given, named = arguments
        return tuple(map(self._entered, given)), {k: self._entered(v) for k, v in named.items()}

    def _entered(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            return enter(argument, self.group)
        return argument

    def after(self, module: nn.Module, output: Any) -> Any:
        """See `Style`."""
        return leave(output, self.group)


def install(module: nn.Module, style: Style) -> None:
    """Run every forward of `module` as `style` says; its parameters are divided by then."""
    plain = module.forward

    def forward(*given: Any, **named: Any) -> Any:
        given, named = style.before(module, (given, named))
        with _seen(module, style):
            output = plain(*given, **named)
        return style.after(module, output)

    module.forward = forward


@contextmanager
def _seen(module: nn.Module, style: Style) -> Iterator[None]:
    """Inside, the module's own parameters are what its forward is to see of them."""
    parameters = dict(module._parameters)
    for name, parameter in parameters.items():
        if parameter is not None:
            del module._parameters[name]
            object.__setattr__(module, name, style.see(name, part_of(parameter)))
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            if parameter is not None:
                module.__dict__.pop(name, None)
                module._parameters[name] = parameter
