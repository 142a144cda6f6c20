"""Live bytes by kind and tier, measured on a running program; enforces limits on the CPU.

A `TorchDispatchMode` that sees every operation, counts each new storage once and follows it to its
end with a weak reference. It works the same on real and on fake tensors, so the dry run and the
measurement are one piece of code. On the CPU, which has one memory, it gives programs a `device`
tier: storages are on the device unless marked otherwise.

It sees what operations return, not what a kernel allocates inside itself, and knows nothing of
models, plans or training; those call `mark`, `labelled` and `set_phase`, which do nothing while no
ledger is active. Costs about 10% of CPU time.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit import gloo
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.policies import Tier
from tightfit.units import format_bytes

Section = tuple[Phase, str]
Kinds = dict[Kind, int]

# `torch.tensor(data)` makes its storage unseen and shows it first to this "view".
_MAKERS = (torch.ops.aten.lift_fresh.default,)
# Asked several times in an operation of tensors whose device Python tells: fake ones.
_DEVICE_OF = torch.ops.prim.device.default

_active: Ledger | None = None


@dataclass(slots=True)
class _Storage:
    """A live storage; `reference` keeps the callback that ends it."""

    count_bytes: int
    kind: Kind
    tier: Tier
    reference: weakref.ref[torch.UntypedStorage] | None = None


@dataclass
class _Peak:
    total_bytes: int = 0
    kinds: Kinds = field(default_factory=dict)


class Ledger(TorchDispatchMode):
    """Counts while it is entered; use it as a context manager around load, init and training.

    Args:
        device: the accelerator; storages elsewhere are on the host tier.
        limits: most bytes per tier. Crossing one raises `torch.OutOfMemoryError` out of the
            operation that allocated, as a card would.

    Attributes:
        chapter: begins the names of sections from now on, so that what comes again, such as the
            second micro-batch of a step, is counted apart.
        shortcut: asked for an operation's result before torch's dispatcher is; it gives
            `NotImplemented` where that is to answer.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        limits: dict[Tier, int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = (device or torch.device("cpu")).type
        self.limits = dict(limits or {})
        self.chapter = ""
        self.shortcut: Callable[[Any, Any, Any], Any] = _no_shortcut
        self._storages: dict[int, _Storage] = {}
        self._now: dict[Tier, Kinds] = {tier: dict.fromkeys(Kind, 0) for tier in Tier}
        self._totals: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._peaks: dict[Section, dict[Tier, _Peak]] = {}
        self._section: Section = (Phase.LOAD, "")
        self._label: tuple[Kind, Tier | None] | None = None
        self._operation = "start"
        self._looks_away = False
        self._replay: Callable[[int, int], None] | None = None
        self._outer: Ledger | None = None
        self._open_section()

    def __enter__(self) -> Self:
        global _active
        self._outer, _active = _active, self
        self._plain_resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._plain_resize)  # type: ignore[method-assign]
        self._plain_imagine = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = self._unseen(self._plain_imagine)  # type: ignore[method-assign]
        self._collectives = gloo.let_go_at_return()
        self._collectives.__enter__()
        self._catch_up()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _active
        _active = self._outer
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._plain_imagine  # type: ignore[method-assign]
        self._collectives.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    # What was counted

    def total_bytes(self, tier: Tier) -> int:
        """Bytes that live on `tier` now."""
        return self._totals[tier]

    def kinds(self, tier: Tier) -> Kinds:
        """Bytes that live on `tier` now, by kind."""
        return _without_zeros(self._now[tier])

    def peak_bytes(self, tier: Tier) -> int:
        """Highest total of `tier` so far."""
        return max(peaks[tier].total_bytes for peaks in self._peaks.values())

    def sections(self) -> dict[Section, dict[Tier, Kinds]]:
        """Kinds at the peak of every (phase, section) and tier."""
        return {
            section: {tier: _without_zeros(peak.kinds) for tier, peak in peaks.items()}
            for section, peaks in self._peaks.items()
        }

    @property
    def section(self) -> Section:
        """The phase, and the part of it, that is being counted."""
        return self._section

    def table(self) -> MemoryTable:
        """The measured table, to lay beside a bill."""
        return table_of_sections(self.sections())

    # What callers say

    def adopt(self, module: nn.Module, parameters: Tier | None = None) -> None:
        """Count a module's parameters, gradients and buffers that were made before or elsewhere.

        Args:
            parameters: their tier; where they are when None.
        """
        for parameter in module.parameters():
            self.mark(parameter, Kind.PARAMETERS, parameters)
            if parameter.grad is not None:
                self.mark(parameter.grad, Kind.GRADIENTS)
        for buffer in module.buffers():
            self.mark(buffer, Kind.BUFFERS)

    def mark(self, tensor: torch.Tensor, kind: Kind, tier: Tier | None = None) -> None:
        """Say what a tensor's storage is for and where it lives; counts it when unseen.

        Of a DTensor, the part that this rank holds.
        """
        tensor = local_part(tensor)
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        record = self._storages.get(storage._cdata)
        if record is None:
            self._follow(storage, kind, tier or self._home(tensor))
            return
        size = record.count_bytes
        self._add(record, -size)
        record.kind, record.tier = kind, tier or record.tier
        self._add(record, size)
        self._tell(record, size)
        peak = self._peaks[self._section][record.tier]
        if peak.total_bytes == self._totals[record.tier]:  # the peak it made has its name now
            peak.kinds = self._now[record.tier].copy()

    def set_section(self, phase: Phase, section: str = "") -> Section:
        """Begin a phase, or a part of one; returns the one before."""
        before, self._section = self._section, (phase, self.chapter + section)
        self._open_section()
        return before

    def return_to_section(self, section: Section) -> None:
        """Go on with a section; what something else has left behind is not in its peak."""
        self._section = section

    @contextmanager
    def labelled(self, kind: Kind, tier: Tier | None) -> Iterator[None]:
        """New storages inside are of `kind`, and on `tier` when given."""
        before = self._label
        self._label = (kind, tier)
        try:
            yield
        finally:
            self._label = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Storages that are made inside are not counted."""
        before, self._looks_away = self._looks_away, True
        try:
            yield
        finally:
            self._looks_away = before

    def replay_device(self, resize: Callable[[int, int], None]) -> None:
        """Tell another counter of every storage on the device, of those that live now first.

        Args:
            resize: called with a storage's number and its bytes, 0 at its end.
        """
        self._replay = resize
        for record in self._storages.values():
            self._tell(record, record.count_bytes)

    # Counting

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's guard against compiling modes is dear, and nothing compiles this one."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, then count the storages it made."""
        if DTensor in types:  # its own operations on the parts it is made of come here next
            return NotImplemented
        if func is _DEVICE_OF:
            return args[0].device
        kwargs = kwargs or {}
        out = self.shortcut(func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if self._looks_away:
            return out
        if func in _MAKERS:
            self._operation = func
            self._see(out)
            return out
        if func.is_view or func.namespace in ("prim", "profiler"):
            return out
        self._operation = func
        self._see(out)
        return out

    def _see(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            if out.is_meta:
                return
            storage = out.untyped_storage()
            record = self._storages.get(storage._cdata)
            if record is None:
                kind, tier = self._label or (self._default_kind(), None)
                self._follow(storage, kind, tier or self._home(out))
            elif record.count_bytes != storage.nbytes():
                self._resize(record, storage.nbytes())
        elif isinstance(out, list | tuple):
            for item in out:
                self._see(item)

    def _follow(self, storage: torch.UntypedStorage, kind: Kind, tier: Tier) -> None:
        key = storage._cdata
        record = _Storage(storage.nbytes(), kind, tier)

        def ended(_: object) -> None:
            if self._storages.get(key) is record:
                del self._storages[key]
            self._add(record, -record.count_bytes)
            self._tell(record, 0)

        record.reference = weakref.ref(storage, ended)
        self._storages[key] = record
        self._add(record, record.count_bytes)
        self._tell(record, record.count_bytes)

    def _resize(self, record: _Storage, size_bytes: int) -> None:
        """Book a storage that has grown or shrunk."""
        change, record.count_bytes = size_bytes - record.count_bytes, size_bytes
        self._add(record, change)
        self._tell(record, size_bytes)

    def _resizing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`UntypedStorage.resize_`, which is no operation, followed by its booking."""

        def resize(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = plain(storage, size_bytes)
            record = self._storages.get(storage._cdata)
            if record is not None:
                self._resize(record, storage.nbytes())
            return resized

        return resize

    def _unseen(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Where a DTensor learns the shape of a result from whole fake tensors, uncounted."""

        def imagine(*args: Any) -> Any:
            with self.uncounted():
                return plain(*args)

        return imagine

    def _catch_up(self) -> None:
        """Book what has been resized since the ledger was left, if it was."""
        for record in list(self._storages.values()):
            assert record.reference is not None
            storage = record.reference()
            if storage is not None and storage.nbytes() != record.count_bytes:
                self._resize(record, storage.nbytes())

    def _add(self, record: _Storage, change: int) -> None:
        """Book `change` bytes and the peak they make.

        Raises:
            torch.OutOfMemoryError: the tier's limit is crossed.
        """
        tier = record.tier
        self._now[tier][record.kind] += change
        total = self._totals[tier] = self._totals[tier] + change
        if change <= 0:
            return
        peak = self._peaks[self._section][tier]
        if total > peak.total_bytes:
            peak.total_bytes, peak.kinds = total, self._now[tier].copy()
        limit = self.limits.get(tier)
        if limit is not None and total > limit:
            raise torch.OutOfMemoryError(
                f"{tier} tier over its limit: {format_bytes(total)} > {format_bytes(limit)} after "
                f"{format_bytes(change)} of {record.kind} in {self._operation} "
                f"({self._section[0]})"
            )

    def _tell(self, record: _Storage, size_bytes: int) -> None:
        if self._replay is not None:
            self._replay(id(record), size_bytes if record.tier is Tier.DEVICE else 0)

    def _open_section(self) -> None:
        """What lives when a section begins is a part of its peak."""
        peaks = self._peaks.setdefault(self._section, {tier: _Peak() for tier in Tier})
        for tier, peak in peaks.items():
            if self._totals[tier] > peak.total_bytes:
                peak.total_bytes, peak.kinds = self._totals[tier], self._now[tier].copy()

    def _home(self, tensor: torch.Tensor) -> Tier:
        return Tier.DEVICE if tensor.device.type == self._device_type else Tier.HOST

    def _default_kind(self) -> Kind:
        """In forward with gradients on, what is made is presumed to be kept for backward."""
        keeps = torch.is_grad_enabled() and self._section[0] is Phase.FORWARD
        return Kind.ACTIVATIONS if keeps else Kind.TEMPORARIES


def _no_shortcut(func: Any, args: Any, kwargs: Any) -> Any:
    """All go through the dispatcher."""
    return NotImplemented


def _without_zeros(kinds: Kinds) -> Kinds:
    return {kind: count for kind, count in kinds.items() if count}


def table_of_sections(sections: dict[Section, dict[Tier, Kinds]]) -> MemoryTable:
    """The highest section of every phase and tier."""
    peaks: dict[Phase, dict[Tier, Kinds]] = defaultdict(dict)
    for (phase, _), tiers in sections.items():
        highest = peaks[phase]  # a phase is known even where nothing lives in it
        for tier, kinds in tiers.items():
            if sum(kinds.values()) > sum(highest.get(tier, {}).values()):
                highest[tier] = kinds
    return MemoryTable(dict(peaks))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself.

    Not `to_local`, which is a view: one of a fake tensor whose storage was freed allocates it anew.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def active() -> Ledger | None:
    """The innermost ledger that is counting, if any."""
    return _active


def mark(tensor: torch.Tensor, kind: Kind, tier: Tier | None = None) -> None:
    """`Ledger.mark` of the active ledger, if any."""
    if _active is not None:
        _active.mark(tensor, kind, tier)


@contextmanager
def labelled(kind: Kind, tier: Tier | None = None) -> Iterator[None]:
    """`Ledger.labelled` of the active ledger, if any."""
    if _active is None:
        yield
        return
    with _active.labelled(kind, tier):
        yield


@contextmanager
def uncounted() -> Iterator[None]:
    """`Ledger.uncounted` of the active ledger, if any."""
    if _active is None:
        yield
        return
    with _active.uncounted():
        yield


def set_phase(phase: Phase) -> None:
    """Begin `phase` in the active ledger, if any."""
    if _active is not None:
        _active.set_section(phase)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """The phase `name` inside, the one before again afterwards."""
    ledger = _active
    if ledger is None:
        yield
        return
    before = ledger.set_section(name)
    try:
        yield
    finally:
        ledger.return_to_section(before)
