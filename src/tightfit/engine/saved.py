"""What autograd has saved, and its storages: on the device, on the host or on the way between.

Says where bytes are and brings them; when is decided in `engine/activations.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.buffers import Buffer, HostBuffers
from tightfit.engine.transfer import THERE, Arrival, Transfer

NO_BACKWARD = -1  # torch's number of a backward where none is going on


class Travelling:
    """A storage of the device whose bytes are on the host, or on their way there as from now.

    On a card its memory is reused in the order of the stream: whoever lets go has the stream wait
    for the copies first, which the host does not.

    Args:
        tensor: one in the storage; all of it travels, whatever part the tensor is.
    """

    _buffer: Buffer | None = None

    def __init__(self, tensor: torch.Tensor, buffers: HostBuffers, transfer: Transfer) -> None:
        self.version = tensor._version  # of the bytes, as torch counts changes in place
        self.span: Span | None = None  # the last one to save it
        self._buffers = buffers
        self._transfer = transfer
        flat = _all_of(tensor)
        # In one piece with its arrival, since a card's backward and the CPU's are two threads.
        self._here: tuple[torch.Tensor, Arrival] | None = (flat, THERE)
        self._sent = THERE
        self._buffer = buffers.lend(flat.numel() * flat.element_size())
        self._there = self._buffer.memory[: self._buffer.needed_bytes].view(flat.dtype)
        self._sent = transfer.copy(self._there, flat)

    def let_go(self) -> None:
        """From now on only the host has it."""
        if self._here is not None:
            self._sent.order()
            self._here[1].order()
            self._sent, self._here = THERE, None

    def stay(self, tensor: torch.Tensor) -> None:
        """Keep it on the device too, where `tensor` still has it."""
        if self._here is None:
            self._here = (_all_of(tensor), THERE)

    def fetch(self) -> bool:
        """Begin to bring it back; False where it is on the device or on its way there."""
        if self._here is not None:
            return False
        with ledger.labelled(Kind.ACTIVATIONS):
            flat = torch.empty_like(self._there, device=self._transfer.device)
        self._here = (flat, self._transfer.copy(flat, self._there))
        return True

    def flat(self) -> torch.Tensor:
        """All of it on the device, `[values]`, for what the stream is given next."""
        assert self._here is not None, "asked for before it was fetched"
        flat, arrival = self._here
        arrival.order()
        return flat

    def __del__(self) -> None:
        """Nobody will ask for it again, and others can have the buffer."""
        if self._buffer is not None:
            self.let_go()
            self._buffers.give_back(self._buffer)


class Span:
    """What is saved from the beginning of a unit to that of the next.

    Args:
        modules: the unit's.
        stays: whether it is so near the end that its tensors stay on the device.
        before: the span before in this forward.
    """

    def __init__(self, modules: Iterable[nn.Module], *, stays: bool, before: Span | None) -> None:
        self.modules = modules
        self.stays = stays
        self.is_known = False  # whether the modules' parameters have been looked at
        self.opened_by = NO_BACKWARD  # the backward that came here last
        self._before = before
        self._travelling: list[weakref.ref[Travelling]] = []

    def add(self, travelling: Travelling) -> None:
        """One of its tensors is in this storage."""
        if travelling.span is not self:
            travelling.span = self
            self._travelling.append(weakref.ref(travelling))

    def travelling(self) -> Iterator[Travelling]:
        """The storages that backward will ask for, in its order."""
        for reference in reversed(self._travelling):
            travelling = reference()
            if travelling is not None:
                yield travelling

    def let_go(self) -> None:
        """Keep nothing of it on the device that no later span has saved too."""
        for travelling in self.travelling():
            if travelling.span is self and not self.stays:
                travelling.let_go()

    def earlier(self, distance: int) -> Span | None:
        """The span so many before, if there is one."""
        span: Span | None = self
        for _ in range(distance):
            span = None if span is None else span._before
        return span

    def and_earlier(self, count: int) -> Iterator[Span]:
        """This span, and as many of those before."""
        span: Span | None = self
        for _ in range(1 + count):
            if span is None:
                return
            yield span
            span = span._before


class Saved:
    """A tensor that autograd has saved: itself, or where in which storage it was."""

    def __init__(self, tensor: torch.Tensor, travelling: Travelling | None, span: Span) -> None:
        self.travelling = travelling
        self.span = span
        self._version = tensor._version
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._shown = tensor.detach()  # shares its count of changes; itself would be a cycle
        if travelling is not None:
            self._stride, self._offset = tensor.stride(), tensor.storage_offset()
            self._shown.data = tensor.new_empty(0)  # the count stays, the storage does not

    def tensor(self) -> torch.Tensor:
        """As it was saved; what travels was fetched before."""
        if self.travelling is None:
            return self._shown
        flat = self.travelling.flat().view(self._dtype)
        return flat.as_strided(self._shape, self._stride, self._offset)

    def check_unchanged(self) -> None:
        """What torch checks of tensors that go through no hooks.

        Raises:
            RuntimeError: the tensor has been changed in place since it was saved.
        """
        if self._shown._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._dtype} {list(self._shape)} is at version "
                f"{self._shown._version}; expected version {self._version} instead"
            )


def _all_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage as its type, `[values]`."""
    values = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((values,), (1,), 0)
