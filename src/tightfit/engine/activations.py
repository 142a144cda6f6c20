"""Tensors saved for backward leave for the host and come back before they are needed.

autograd hands every tensor that it saves to a pair of hooks, which this puts around the forward of
the model in training. A forward falls into spans, each from the beginning of a unit to that of the
next; backward takes them in reverse, and within a span the last saved first, so every forward says
itself in which order its tensors come back. With `prefetch` spans ahead:

- In forward a span's tensors are on their way to the host while the next `prefetch` spans compute,
  and are let go of when one more begins.
- The last `1 + prefetch` layers and what follows them stay: backward begins with them.
- In backward the `prefetch` spans before one are fetched when its first tensor is asked for. A
  backward in another order fetches what is missing when it is asked for.

So the device holds the activations of at most `1 + prefetch` layers at any time, and of what
follows the last; and besides, as in plain training, of small tensors and of what all layers share
(rotary angles, a mask). The host holds those of all other layers, each storage once and in exactly
its size, the same in every micro-batch.

A checkpointed layer saves its input alone; what backward computes again is saved under torch's own
hooks and stays. Knows nothing of layers' insides, of parameters' placement or of ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.bill.table import Kind
from tightfit.engine.buffers import HostBuffers
from tightfit.engine.mesh import is_shard
from tightfit.engine.saved import NO_BACKWARD, Saved, Span, Travelling
from tightfit.engine.transfer import Transfer
from tightfit.engine.units import Unit
from tightfit.ledger import local_part
from tightfit.policies import SMALLEST_LEAVING_BYTES, PlacementPolicy


class ActivationOffload:
    """Lets what `root`'s forward saves leave the device, from when it is made.

    It works in training with gradients on, whoever calls `root`. Several forwards may come before
    a backward, and a graph that is dropped without one gives its memory back. A second backward
    through the same graph fetches everything again; until it begins, or the next forward, what the
    first has fetched stays. As in plain training, a saved tensor that is changed in place is an
    error.

    Args:
        root: what is called in training.
        units: of it, in the order of forward; they are told to say when they begin.
        placement: says how many layers are fetched ahead.
        transfer: whose device the model computes on.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        placement: PlacementPolicy,
        transfer: Transfer,
    ) -> None:
        self._root = root
        self._transfer = transfer
        self._ahead = placement.prefetch
        self.buffers = HostBuffers(transfer, Kind.ACTIVATIONS)
        self._span: Span | None = None  # where the forward is that is going on
        self._owned: set[int] = set()  # storages that somebody else keeps: parameters, inputs
        self._travelling: weakref.WeakKeyDictionary[
            torch.UntypedStorage, weakref.ref[Travelling]
        ] = weakref.WeakKeyDictionary()
        self._backward = NO_BACKWARD
        self._fetched: list[weakref.ref[Travelling]] = []  # by that backward
        staying = _staying(units, 1 + self._ahead)
        for unit in units:
            begin = functools.partial(self._begin_unit, unit, stays=unit in staying)
            unit.before_use.append(begin)
        self._go_round(root)

    def _go_round(self, root: nn.Module) -> None:
        """A `forward` of its own and not hooks: they are not called when Ctrl-C interrupts one."""
        plain_forward = root.forward

        @functools.wraps(plain_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._recording((*args, *kwargs.values())):
                return plain_forward(*args, **kwargs)

        root.forward = forward

    @contextmanager
    def _recording(self, inputs: Iterable[object]) -> Iterator[None]:
        """A forward."""
        if not (torch.is_grad_enabled() and self._root.training):
            yield
            return
        self._forget_backward(NO_BACKWARD)
        self.buffers.settle()
        self._owned = {
            *_storages(tensor for tensor in inputs if isinstance(tensor, torch.Tensor)),
            *_storages(self._root.parameters()),
            *_storages(self._root.buffers()),
        }
        self._span = Span((), stays=False, before=None)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._span = None
            self._travelling.clear()
            self.buffers.note()

    def _begin_unit(self, unit: Unit, *, stays: bool) -> None:
        """The next span begins, and one is far enough behind."""
        if self._span is None:
            return
        stays = stays or (self._span.stays and not unit.is_layer)  # a tied output layer
        self._span = Span(unit.modules, stays=stays, before=self._span)
        far = self._span.earlier(self._ahead + 1)
        if far is not None:
            far.let_go()

    # What autograd calls, without gradients

    def _pack(self, tensor: torch.Tensor) -> Saved:
        span = self._span
        assert span is not None, "the hooks are there during a forward only"
        travelling = self._sent(tensor, span) if self._may_leave(tensor, span) else None
        return Saved(tensor, travelling, span)

    def _unpack(self, saved: Saved) -> torch.Tensor:
        saved.check_unchanged()
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._forget_backward(backward)
        if saved.span.opened_by != backward:
            saved.span.opened_by = backward
            for span in saved.span.and_earlier(self._ahead):
                for travelling in span.travelling():
                    self._fetch(travelling)
        if saved.travelling is not None:
            self._fetch(saved.travelling)
        return saved.tensor()

    def _fetch(self, travelling: Travelling) -> None:
        if travelling.fetch():
            self._fetched.append(weakref.ref(travelling))

    def _forget_backward(self, following: int) -> None:
        """What a backward has fetched and its graph still keeps goes back to the host alone."""
        self._backward = following
        for reference in self._fetched:
            travelling = reference()
            if travelling is not None:
                travelling.let_go()
        self._fetched.clear()

    def _may_leave(self, tensor: torch.Tensor, span: Span) -> bool:
        """Whether it is worth it, and its storage is plain memory that nobody else keeps."""
        if tensor.device != self._transfer.device or tensor.layout is not torch.strided:
            return False
        if is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        if size_bytes < SMALLEST_LEAVING_BYTES or size_bytes % tensor.element_size():
            return False
        if not span.is_known:  # shards become parameters when their unit begins, after its hooks
            span.is_known = True
            for module in span.modules:
                self._owned.update(_storages(module.parameters()))
        return storage._cdata not in self._owned

    def _sent(self, tensor: torch.Tensor, span: Span) -> Travelling | None:
        """The tensor's storage on its way, begun now unless it was before; None where it stays.

        One that layers on the way share with the last ones stays on the device as well.
        """
        storage = tensor.untyped_storage()
        known = self._travelling.get(storage)
        travelling = None if known is None else known()
        if travelling is None or travelling.version != tensor._version:
            if span.stays:
                return None
            travelling = Travelling(tensor, self.buffers, self._transfer)
            self._travelling[storage] = weakref.ref(travelling)
        elif span.stays:
            travelling.stay(tensor)
        span.add(travelling)
        return travelling


def _staying(units: Sequence[Unit], count: int) -> set[Unit]:
    """The last so many layers, and units that follow them."""
    layers = [index for index, unit in enumerate(units) if unit.is_layer]
    return set(units[layers[-count:][0] :])


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Of tensors in memory of their own; what ranks share is made whole before it is used."""
    for tensor in tensors:
        if not is_shard(tensor):
            yield local_part(tensor).untyped_storage()._cdata
