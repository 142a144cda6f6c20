"""Where gradients wait for the optimizer: in `.grad` on the device, or on the host.

Those that end on the host leave as soon as backward has finished them, so the device holds one or
two at a time, and micro-batches add up there in the order in which autograd would add them; or they
add up on the device and leave when the step wants them. Of a parameter that ranks share, each rank
holds the gradient of its own part. Knows nothing of what is done with gradients afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.disk_gradients import DiskGradient
from tightfit.engine.hooks import when_accumulated
from tightfit.engine.slab import HostSlab, Reserved
from tightfit.engine.transfer import THERE, Arrival, Transfer
from tightfit.ledger import local_part
from tightfit.units import MIB

_LANDING_BYTES = 16 * MIB


class GradientStore(Protocol):
    """Holds the gradients of one optimizer step."""

    def take(self) -> Mapping[nn.Parameter, torch.Tensor | DiskGradient]:
        """The summed gradients of all backward calls since `clear`."""
        ...

    def norms(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """The 2-norms of those that are known already, fp32 scalars."""
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

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.norms`."""
        return {}

    def clear(self) -> None:
        """See `GradientStore.clear`."""
        for parameter in self._parameters:
            parameter.grad = None


class HostGradients:
    """Gradients that move to the host as they come.

    Each parameter has a host tensor of its own type for as long as the object lives. What a second
    micro-batch adds lands in a small spare tensor first, a piece at a time.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], transfer: Transfer, slab: HostSlab
    ) -> None:
        self._parameters = list(parameters)
        self._transfer = transfer
        self._sums = {p: _reserve_like(slab, local_part(p)) for p in self._parameters}
        self._landing = _reserve_landing(slab, self._parameters)
        self._filled: set[nn.Parameter] = set()
        self._last: Arrival = THERE
        for parameter in self._parameters:
            when_accumulated(parameter, self._collect)

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.take`."""
        self._last.wait()
        return {p: self._sums[p].tensor for p in self._parameters if p in self._filled}

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.norms`."""
        return {}

    def clear(self) -> None:
        """See `GradientStore.clear`; after a backward that failed midway, one may be left."""
        self._filled.clear()
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _collect(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # all of it was received
            return
        gradient = local_part(parameter.grad)
        ledger.mark(gradient, Kind.GRADIENTS)
        self._last.wait()  # else gradients pile up where copies are slower than backward
        total = self._sums[parameter].tensor
        if parameter in self._filled:
            self._add(total.view(-1), gradient.view(-1))
        else:
            self._last = self._transfer.copy(total, gradient)
            self._filled.add(parameter)
        parameter.grad = None

    @torch.no_grad()
    def receive(self, parameter: nn.Parameter, rows: Iterator[torch.Tensor]) -> None:
        """Take a gradient that comes in consecutive rows, beside what autograd may bring later."""
        total = self._sums[parameter].tensor
        first = 0
        for piece in rows:
            ledger.mark(piece, Kind.GRADIENTS)
            self._last.wait()
            place = total[first : first + len(piece)]
            first += len(piece)
            if parameter in self._filled:
                self._add(place.view(-1), piece.view(-1))
            else:
                self._last = self._transfer.copy(place, piece)
        self._filled.add(parameter)

    def _add(self, total: torch.Tensor, gradient: torch.Tensor) -> None:
        landing = self._landing.tensor.view(gradient.dtype)
        for sums, values in zip(
            total.split(landing.numel()), gradient.split(landing.numel()), strict=True
        ):
            landed = landing[: values.numel()]
            self._transfer.copy(landed, values).wait()
            sums.add_(landed)


class LateHostGradients:
    """Gradients that add up on the device and move to the host when the step wants them."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], transfer: Transfer, slab: HostSlab
    ) -> None:
        self._transfer = transfer
        self._hosts = {p: _reserve_like(slab, local_part(p)) for p in parameters}
        self._on_device = DeviceGradients(self._hosts)

    @torch.no_grad()
    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.take`."""
        taken = self._on_device.take()
        for parameter, gradient in taken.items():
            self._transfer.copy(self._hosts[parameter].tensor, gradient)
        self._transfer.wait()
        self._on_device.clear()
        return {parameter: self._hosts[parameter].tensor for parameter in taken}

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.norms`."""
        return {}

    def clear(self) -> None:
        """See `GradientStore.clear`."""
        self._on_device.clear()


class SeveralStores:
    """Gradients of which each store has some.

    Args:
        parameters: of all stores, in the order in which gradients are wanted.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stores: Sequence[GradientStore]) -> None:
        self._parameters = parameters
        self._stores = stores

    def take(self) -> dict[nn.Parameter, torch.Tensor | DiskGradient]:
        """See `GradientStore.take`."""
        taken = {p: gradient for store in self._stores for p, gradient in store.take().items()}
        return {p: taken[p] for p in self._parameters if p in taken}

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """See `GradientStore.norms`."""
        return {p: norm for store in self._stores for p, norm in store.norms().items()}

    def clear(self) -> None:
        """See `GradientStore.clear`."""
        for store in self._stores:
            store.clear()


def _reserve_like(slab: HostSlab, tensor: torch.Tensor) -> Reserved:
    return slab.reserve(tensor.shape, tensor.dtype, Kind.GRADIENTS)


def _reserve_landing(slab: HostSlab, parameters: Sequence[nn.Parameter]) -> Reserved:
    largest = max((local_part(p).numel() * p.element_size() for p in parameters), default=0)
    return slab.reserve((min(max(largest, 16), _LANDING_BYTES),), torch.uint8, Kind.TRANSFER)


def _mark_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        ledger.mark(parameter.grad, Kind.GRADIENTS)
