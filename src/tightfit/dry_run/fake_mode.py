"""torch's mode of fake tensors, with answers where it has none, and quicker.

Where a program reads a value it gets one: finite, true, positive. Grouped products (of experts)
are there for every type, as they are for real tensors; torch 2.13 fakes them for bf16 alone.

torch remembers what an operation makes of tensors like these, but describes tensors at length to
look it up, which takes longer than all else. Here a description of plain fake tensors and plain
values comes first; what torch may remember is for torch to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses._fake_tensor_utils import _CacheKeyState
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _DispatchCacheEntryOutputInfo,
    _DispatchCacheValidEntry,
)

_PLAIN = (
    bool, int, float, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# As torch's own memory, for all modes.
_known: dict[tuple[Any, ...], _DispatchCacheValidEntry] = {}


class QuickFakes(FakeTensorMode):
    """The mode; enter it as torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _CacheKeyState(None)
        self._like: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `Ledger`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or leave it to torch."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked most often of all
            return args[0].device
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return True if args[0].dtype is torch.bool else 1
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            left, right = (matrix.to(torch.bfloat16) for matrix in args[:2])
            return func(left, right, *args[2:], **kwargs).to(args[0].dtype)
        key = self._key(func, args, kwargs)
        if key is None:
            return self.dispatch(func, types, args, kwargs)
        entry = _known.get(key)
        if entry is not None:
            return self._results(entry, func, args)
        result = self.dispatch(func, types, args, kwargs)
        self._learn(key, func, args, kwargs)
        return result

    def shortcut(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives that was done before, for the mode right above this one, which
        is spared the way through torch's dispatcher; `NotImplemented` where it has to go it."""
        key = self._key(func, args, kwargs)
        entry = None if key is None else _known.get(key)
        if entry is None:
            return NotImplemented
        with torch._C._DisableTorchDispatch():  # this mode would be asked for what it makes
            return self._results(entry, func, args)

    def _results(self, entry: _DispatchCacheValidEntry, func: Any, args: Any) -> Any:
        """All that torch remembers of an operation, made again."""
        made = tuple(self._made(info, func, args) for info in entry.output_infos)
        return made if entry.is_output_tuple else made[0]

    def _learn(self, key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> None:
        """Keep what torch keeps of an operation that it has just done."""
        try:
            entry = self.cache.get(self._cache_key(self._state, func, args, kwargs))
        except _BypassDispatchCache:
            return
        if isinstance(entry, _DispatchCacheValidEntry) and all(map(_is_plain, entry.output_infos)):
            _known[key] = entry

    def _made(self, info: _DispatchCacheEntryOutputInfo, func: Any, args: Any) -> Any:
        """One of an operation's results, as torch makes it of what it remembers."""
        if info.inplace_idx is not None:
            return args[info.inplace_idx]
        known: Any = info.metadata
        if known is None:
            return None
        tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
        if func.is_view:
            storage = args[info.view_idx].untyped_storage()
            tensor.set_(storage, known.storage_offset, known.shape, known.stride)
        return self._fake(tensor, known.device)

    def _fake(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor of one on the meta device: torch makes the first, others are like it."""
        like = self._like.get(device)
        if like is None:
            first = FakeTensor(self, meta, device)
            self._like[device] = dict(vars(first))
            return first
        made = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(like)
        return made

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Everything that decides what comes out; None where an argument is not plain."""
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        described = self._describe(key, args) and self._describe(key, kwargs.values())
        return tuple(key) if described else None

    def _describe(self, key: list[Any], values: Iterable[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return False
                key += (
                    value.shape, value.stride(), value.storage_offset(), value.dtype,
                    value.fake_device, value.requires_grad, value.untyped_storage().nbytes(),
                )  # fmt: skip
            elif kind in _PLAIN:
                key += (kind, value)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                key.append(len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True


def _is_plain(info: _DispatchCacheEntryOutputInfo) -> bool:
    """Whether it says of a result no more than `QuickFakes` makes again."""
    known: Any = info.metadata
    if known is None:
        return info.inplace_idx is not None or info.constant_value is None
    special = known.is_conj or known.is_neg or known.requires_grad
    return known.layout is torch.strided and not special
