"""What the ranks of a run do together in each step, whoever shares what.

The engine tells its `Ranks` when a backward begins and when the gradients are wanted; they add the
gradients of all ranks up and know the norm of all of them. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from tightfit.engine.clipping import Gradients, total_norm
from tightfit.engine.hooks import when_accumulated
from tightfit.engine.mesh import is_divided
from tightfit.errors import ConfigError
from tightfit.ledger import local_part


class Ranks(Protocol):
    """All ranks of a run, seen from one of them. Every rank must call the same in the same order.

    Gradients are summed, never averaged: each rank's loss is already divided by the trained
    tokens of the global batch.

    Attributes:
        data_rank: the number of this rank among those that see different sequences. Ranks of a
            tensor group have the same, and are to be given the same batches.
        data_ranks: how many of those there are.
    """

    @property
    def data_rank(self) -> int: ...  # noqa: D102

    @property
    def data_ranks(self) -> int: ...  # noqa: D102

    @property
    def is_first(self) -> bool:
        """Whether this is the first of those that hold the same parameters or parts of them."""
        ...

    @property
    def is_first_copy(self) -> bool:
        """Whether what this rank holds is part of the first copy of the parameters."""
        ...

    @property
    def copies(self) -> frozenset[nn.Parameter]:
        """Parameters that another stage of a pipeline has too, and counts and saves."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all that see different sequences, the same on every rank."""
        ...

    def settle(self) -> None:
        """Between steps: parameters are what this rank keeps, nothing is whole for a while."""
        ...

    def begin_backward(self, *, last: bool) -> None:
        """A backward comes; `last` if it is that of the planned last micro-batch of a step."""
        ...

    def finish_gradients(self) -> None:
        """Return when every gradient is the sum over all ranks and all micro-batches."""
        ...

    def discard_gradients(self) -> None:
        """Forget what is on its way to a sum, also after a backward that failed midway."""
        ...

    def global_norm(
        self, gradients: Gradients, known: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """The norm of all gradients, fp32, the same number on every rank.

        Args:
            gradients: those that this rank holds, by parameter.
            known: norms of some of them, as of `total_norm`.
        """
        ...


class OneRank:
    """A rank that shares nothing; see `Ranks`."""

    data_rank = 0
    data_ranks = 1
    is_first = True
    is_first_copy = True
    copies: frozenset[nn.Parameter] = frozenset()

    def total(self, values: Sequence[float]) -> list[float]:
        """Its own."""
        return list(values)

    def settle(self) -> None:
        """Nothing to do."""

    def begin_backward(self, *, last: bool) -> None:
        """Nothing to do."""

    def finish_gradients(self) -> None:
        """Nothing to do."""

    def discard_gradients(self) -> None:
        """Nothing to do."""

    def global_norm(
        self, gradients: Gradients, known: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """Its own."""
        return total_norm(gradients, known)


class Replicas:
    """Ranks that each hold all of the model; see `Ranks`.

    A gradient is summed over ranks in its own storage, as soon as the last micro-batch's backward
    has finished it, while backward goes on: no bucket is copied to, and nothing is on the bill
    that one rank would not have. As with torch's DistributedDataParallel, every rank's last
    micro-batch must reach the same parameters, so that all sum the same ones in the same order.

    Args:
        group: the ranks.
        module: made equal on all of them by sending the first one's values; what has no memory yet
            is read by each from the same file.
        parameters: those that are trained.
        gradients_leave: whether gradients leave the device as they come, so that those of every
            micro-batch must be summed at once.
    """

    copies: frozenset[nn.Parameter] = frozenset()

    def __init__(
        self,
        group: dist.ProcessGroup,
        module: nn.Module,
        parameters: Iterable[nn.Parameter],
        *,
        gradients_leave: bool,
    ) -> None:
        self.data_rank = group.rank()
        self.data_ranks = group.size()
        self.is_first = self.is_first_copy = self.data_rank == 0
        self._group = group
        self._parameters = list(parameters)
        self._gradients_leave = gradients_leave
        self._reducing = False
        self._reduced: set[torch.Tensor] = set()
        self._on_their_way: list[dist.Work] = []
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if local_part(tensor).untyped_storage().size():
                    dist.broadcast(local_part(tensor), group=group, group_src=0)
        for parameter in self._parameters:
            when_accumulated(parameter, self._gradient_is_there)

    def total(self, values: Sequence[float]) -> list[float]:
        """See `Ranks.total`."""
        return summed(values, self._parameters[0].device, self._group)

    def settle(self) -> None:
        """Nothing to do: all that it holds is whole."""

    def begin_backward(self, *, last: bool) -> None:
        """See `Ranks.begin_backward`.

        Raises:
            ConfigError: the gradients of this step were summed over ranks already.
        """
        if self._reduced and not self._gradients_leave:
            raise ConfigError(
                "more micro-batches than accumulation_steps of the plan: call step() after the "
                "last of them, or plan with as many as there are"
            )
        self._reducing = last or self._gradients_leave

    def finish_gradients(self) -> None:
        """See `Ranks.finish_gradients`; a step of fewer micro-batches is summed here."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter not in self._reduced:
                self._reduce(parameter)
        self._wait()

    def discard_gradients(self) -> None:
        """See `Ranks.discard_gradients`."""
        self._wait()

    def global_norm(
        self, gradients: Gradients, known: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """The same on all, as they hold the same gradients."""
        return total_norm(gradients, known)

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._reducing and self._gradients_leave:
            dist.all_reduce(local_part(parameter.grad), group=self._group)
        elif self._reducing:
            self._reduce(parameter)

    def _reduce(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        work = dist.all_reduce(local_part(parameter.grad), group=self._group, async_op=True)
        assert work is not None
        self._on_their_way.append(work)
        self._reduced.add(parameter)

    def _wait(self) -> None:
        for work in self._on_their_way:
            work.wait()
        self._on_their_way.clear()
        self._reduced.clear()


class BesideDataRanks:
    """What ranks that share a model out have in common: all but the norm is their data ranks'.

    Args:
        data: those that hold the same parts; see `Ranks`.
        group: those that hold the other parts.
        device: where numbers can be summed.
    """

    copies: frozenset[nn.Parameter] = frozenset()

    def __init__(self, data: Ranks, group: dist.ProcessGroup, device: torch.device) -> None:
        self.data_rank = data.data_rank
        self.data_ranks = data.data_ranks
        self.is_first = data.is_first
        self.is_first_copy = data.is_first_copy
        self.total = data.total
        self.settle = data.settle
        self.begin_backward = data.begin_backward
        self.finish_gradients = data.finish_gradients
        self.discard_gradients = data.discard_gradients
        self._data = data
        self._group = group
        self._device = device


class TensorGroup(BesideDataRanks):
    """Ranks that share each layer's matrices, beside ranks that see other sequences."""

    def __init__(self, data: Ranks, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(data, group, device)
        self.is_first = data.is_first and dist.get_rank(group) == 0

    def global_norm(
        self, gradients: Gradients, known: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """Parts are added up over the group, and what all have is counted once."""
        parts = {p: g for p, g in gradients.items() if is_divided(p)}
        norm = self._data.global_norm(parts, known)
        square = square_over(norm, self._group, self._device)
        wholes = {p: g for p, g in gradients.items() if not is_divided(p)}
        square += self._data.global_norm(wholes, known).to(square).square()
        return square.sqrt().to(norm.device, norm.dtype)


def square_over(norm: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The square of the norm of what all of a group hold, of the norms of each: fp64, on `device`.

    In fp64 the order of ranks is no matter.
    """
    square = norm.to(device, torch.float64).square()
    dist.all_reduce(square, group=group)
    return square


def summed(
    values: Sequence[float], device: torch.device, *groups: dist.ProcessGroup
) -> list[float]:
    """The sums over the ranks of one group after the other, in fp64."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(numbers, group=group)
    found: list[float] = numbers.tolist()
    return found
