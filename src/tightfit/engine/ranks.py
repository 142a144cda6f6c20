"""What the ranks of a run do together in each step, whoever shares what.

The engine tells its `Ranks` when a backward begins and when the gradients are wanted; they add the
gradients of all ranks up and know the norm of all of them. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from tightfit.errors import ConfigError


class Ranks(Protocol):
    """All ranks of a run, seen from one of them. Every rank must call the same in the same order.

    Gradients are summed, never averaged: each rank's loss is already divided by the trained
    tokens of the global batch.
    """

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different sequences."""
        ...

    @property
    def data_ranks(self) -> int:
        """How many see different sequences."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this is the first of those that hold the same parameters or parts of them."""
        ...

    @property
    def is_first_copy(self) -> bool:
        """Whether what this rank holds is part of the first copy of the parameters."""
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

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, the same number on every rank.

        Args:
            norm: fp32 scalar, that of the gradients that this rank holds.
        """
        ...


class OneRank:
    """A rank that shares nothing; see `Ranks`."""

    data_rank = 0
    data_ranks = 1
    is_first = True
    is_first_copy = True

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

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Its own."""
        return norm


class Replicas:
    """Ranks that each hold all of the model; see `Ranks`.

    A gradient is summed over ranks in its own storage, as soon as the last micro-batch's backward
    has finished it, while backward goes on: no bucket is copied to, and nothing is on the bill
    that one rank would not have. As with torch's DistributedDataParallel, every rank's last
    micro-batch must reach the same parameters, so that all sum the same ones in the same order.

    Args:
        module: made equal on all ranks by sending rank 0's values; what has no memory yet is read
            by each from the same file.
        parameters: those that are trained.
        gradients_leave: whether gradients leave the device as they come, so that those of every
            micro-batch must be summed at once.
    """

    def __init__(
        self, module: nn.Module, parameters: Iterable[nn.Parameter], *, gradients_leave: bool
    ) -> None:
        self._parameters = list(parameters)
        self._gradients_leave = gradients_leave
        self._reducing = False
        self._reduced: set[torch.Tensor] = set()
        self._on_their_way: list[dist.Work] = []
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.untyped_storage().size():
                    dist.broadcast(tensor, 0)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)

    @property
    def data_rank(self) -> int:
        """See `Ranks.data_rank`."""
        return dist.get_rank()

    @property
    def data_ranks(self) -> int:
        """See `Ranks.data_ranks`."""
        return dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """See `Ranks.is_first`."""
        return dist.get_rank() == 0

    is_first_copy = is_first

    def total(self, values: Sequence[float]) -> list[float]:
        """See `Ranks.total`."""
        return summed(values, next(iter(self._parameters)).device)

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

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The same on all, as they hold the same gradients."""
        return norm

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        if self._reducing:
            self._reduce(parameter)
            if self._gradients_leave:
                self._wait()

    def _reduce(self, parameter: torch.Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        self._on_their_way.append(work)
        self._reduced.add(parameter)

    def _wait(self) -> None:
        for work in self._on_their_way:
            work.wait()
        self._on_their_way.clear()
        self._reduced.clear()


def summed(values: Sequence[float], device: torch.device) -> list[float]:
    """The sums over all ranks, in fp64."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers)
    found: list[float] = numbers.tolist()
    return found
