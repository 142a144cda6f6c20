"""Where gradients wait for the optimizer: in `.grad` on the device, or on the host.

On the host, each gradient leaves as soon as backward has finished it, so the device holds one or
two at a time; micro-batches add up on the host in the order in which autograd would add them.
Of a parameter that ranks share, each rank holds the gradient of its own part.
Knows nothing of what is done with gradients afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.transfer import Transfer
from tightfit.ledger import local_part


class GradientStore(Protocol):
    """Holds the gradients of one optimizer step."""

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """The summed gradients of all backward calls since `clear`, in the order of parameters."""
        ...

    def clear(self) -> None:
        """Forget them; what a next backward makes begins a new sum."""
        ...


class DeviceGradients:
    """Gradients where autograd leaves them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(_mark_gradient)

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.take`."""
        return {p: local_part(p.grad) for p in self._parameters if p.grad is not None}

    def clear(self) -> None:
        """See `GradientStore.clear`."""
        for parameter in self._parameters:
            parameter.grad = None


class HostGradients:
    """Gradients that move to the host as they come.

    Each parameter has a host tensor of its own type for as long as the object lives. A second
    micro-batch first lands in a spare tensor as large as the largest parameter, made on demand.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], transfer: Transfer) -> None:
        self._parameters = list(parameters)
        self._transfer = transfer
        self._sums = {
            p: transfer.empty_on_host(local_part(p), Kind.GRADIENTS) for p in self._parameters
        }
        self._filled: set[nn.Parameter] = set()
        self._landing: torch.Tensor | None = None
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.take`."""
        self._transfer.wait()
        return {p: self._sums[p] for p in self._parameters if p in self._filled}

    def clear(self) -> None:
        """See `GradientStore.clear`; after a backward that failed midway, one may be left."""
        self._filled.clear()
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _collect(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        gradient = local_part(parameter.grad)
        ledger.mark(gradient, Kind.GRADIENTS)
        self._transfer.wait()  # else gradients pile up where copies are slower than backward
        if parameter in self._filled:
            landing = self._landing_like(gradient)
            self._transfer.copy(landing, gradient)
            self._transfer.wait()
            self._sums[parameter].add_(landing)
        else:
            self._transfer.copy(self._sums[parameter], gradient)
            self._filled.add(parameter)
        parameter.grad = None

    def _landing_like(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._landing is None:
            largest = max(self._sums.values(), key=lambda sum_: sum_.numel() * sum_.element_size())
            self._landing = self._transfer.empty_on_host(largest, Kind.BUFFERS).view(-1)
        raw = self._landing.view(gradient.dtype)
        return raw[: gradient.numel()].view(gradient.shape)


def _mark_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        ledger.mark(parameter.grad, Kind.GRADIENTS)
