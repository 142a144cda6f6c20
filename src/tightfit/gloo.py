"""Collectives of gloo that are over when they return, so that memory can be counted.

gloo's threads drop a collective, and with it the tensors that they were given, a moment after they
have said that it is done: some microseconds, or milliseconds where threads wait for a core or for
the interpreter. What the caller lets go of meanwhile lives on. Here that was so in a quarter of all
gathers, and a rank's measured peak had a layer's buffer more in it, by chance. NCCL has no such
threads: a card's memory is ordered by its streams.

So while memory is counted a collective returns when nobody but the caller holds what it was given.
Knows nothing of what is counted. What is sent asynchronously is the caller's until it drops the
`Work`, and functional collectives, which C++ starts by itself, are not seen.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)  # of torch.distributed, as far as this torch has them
_LONGEST_SECONDS = 1.0  # then it is no thread of gloo that holds it
_LOOK_AGAIN_SECONDS = 1e-5


@contextmanager
def let_go_at_return() -> Iterator[None]:
    """Inside, synchronous collectives on gloo return when its threads hold no tensor of theirs."""
    modules = (dist, dist.distributed_c10d) if dist.is_available() else ()
    plain = [
        (module, name, vars(module)[name])
        for module in modules
        for name in _COLLECTIVES
        if name in vars(module)
    ]
    for module, name, collective in plain:
        setattr(module, name, _letting_go(collective))
    try:
        yield
    finally:
        for module, name, collective in plain:
            setattr(module, name, collective)


def _letting_go(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*inputs: Any, **named: Any) -> Any:
        if not dist.is_initialized() or dist.get_backend() != "gloo":
            return collective(*inputs, **named)
        tensors = list(_tensors((*inputs, *named.values())))
        before = _holders(tensors)
        work = collective(*inputs, **named)
        if work is None:
            _wait_until_let_go(tensors, before)
        return work

    return call


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among a collective's arguments, which may be in lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def _wait_until_let_go(tensors: list[torch.Tensor], before: list[int]) -> None:
    until = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < until:
        if all(now <= then for now, then in zip(_holders(tensors), before, strict=True)):
            return
        time.sleep(_LOOK_AGAIN_SECONDS)  # lets gloo's threads have the interpreter and the core


def _holders(tensors: list[torch.Tensor]) -> list[int]:
    """How often each tensor is held, and its memory by views of it: gloo takes either.

    Who holds a tensor in C++ holds its Python object too, and needs the interpreter to let it go.
    """
    return [
        tensor._use_count()  # type: ignore[attr-defined]  # its stubs do not know it
        + sys.getrefcount(tensor)
        + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        for tensor in tensors
    ]
