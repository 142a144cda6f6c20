"""Parameters that live on the host or the disk and come to the device, unit by unit, to compute.

A unit is fetched before its modules' forward and again before their backward; at the same time the
next `prefetch` units are set on their way and all others are given up, so that the device holds at
most 1 + `prefetch` units. That can be done at once: when a unit begins, the work of the one before
has been given to the device, and torch's backward runs strictly in the reverse order of forward. A
unit stays until another one begins, never until its own forward returns: with a chunked loss the
output layer's weight is used later, and between forward and backward nothing needs to move.

Shards of FSDP2 come when they are to be gathered, by the same calls: FSDP2 gathers in the hooks
that follow, and where it gathers ahead, its gather itself asks for the shard. What is whole
already, as in backward in stages 1 and 2, is not fetched.

Frozen parameters stream like others. Nothing is ever written back: whoever updates parameters does
it where they live (`host_values`, `on_disk`), while nothing is on the device (`release`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tightfit.engine.disk_parameters import DiskParameters
from tightfit.engine.pipeline import DiskTier
from tightfit.engine.placement import first_units
from tightfit.engine.residency import Home, HostHome, Visitors
from tightfit.engine.sharding import BookedAllGather
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer
from tightfit.engine.units import Unit
from tightfit.ledger import local_part
from tightfit.policies import PlacementPolicy


class ParameterStream:
    """Fetches the parameters of a model's units and gives them up.

    What several units have in common stays on the device, and so does what belongs to a module
    around other units, which is needed all the time, unless it is sharded, and so gathered once.

    Args:
        units: all of the model's. Those that stream reserve memory in `slab`.
        stays: parameters that are on the device all the time.
        disk: where they live; on the host when None.
        on_host: those that live on the host nevertheless.

    Attributes:
        is_final: whether a unit's values are those that the next forward needs. One that is still
            being updated is not fetched ahead; whoever uses it waits for that first.
        on_disk: the values of those that live there; None where none does.

    Raises:
        DoesNotFitError: the disk is too full.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        placement: PlacementPolicy,
        transfer: Transfer,
        slab: HostSlab,
        stays: Collection[nn.Parameter] = (),
        disk: DiskTier | None = None,
        on_host: Collection[nn.Parameter] = (),
    ) -> None:
        self.is_final: Callable[[Unit], bool] = _always
        self._prefetch = placement.prefetch
        self._sharding = _sharding_root(units)
        times = Counter(parameter for unit in units for parameter in unit.parameters)
        around = {unit for unit in units if _surrounds(unit, units)}
        self._unit_of: dict[nn.Parameter, Unit] = {}
        for unit in first_units(units, placement.parameter_fraction):
            if self._sharding is not None or unit not in around:
                own = [p for p in unit.parameters if times[p] == 1 and p not in stays]
                # Of few rows, some ranks hold none.
                self._unit_of |= {p: unit for p in own if local_part(p).numel()}
        far = [p for p in self._unit_of if disk is not None and p not in on_host]
        near = [p for p in self._unit_of if p not in set(far)]
        self._host = HostHome(near, transfer, slab)
        self.on_disk = DiskParameters(far, transfer, slab, disk) if disk and far else None
        homes: dict[Unit, dict[nn.Parameter, Home]] = {}
        for parameter, unit in self._unit_of.items():
            homes.setdefault(unit, {})[parameter] = self._home(parameter)
        self._visitors = {unit: Visitors(its_own, transfer) for unit, its_own in homes.items()}
        self._slots = {unit: _slot(unit) for unit in self._visitors}
        self._route = _Route(list(self._visitors), around)
        self._current: Unit | None = None

    def _home(self, parameter: nn.Parameter) -> Home:
        """Where one of those that stream lives."""
        if self.on_disk is not None and self.on_disk.has(parameter):
            return self.on_disk
        return self._host

    def adopt(self, values: Callable[[nn.Parameter], torch.Tensor] | None = None) -> None:
        """Move the parameters' values to where they will live, and begin to watch.

        The slab has been allocated.

        Args:
            values: those of a parameter now; what it holds when None.

        Raises:
            DiskError: the disk cannot take them.
        """
        if self._sharding is not None:
            # Where FSDP2 pads shards, which it does at the first forward and only looks at later.
            self._sharding._get_fsdp_state()._lazy_init()
        for unit, visitors in self._visitors.items():
            visitors.adopt(values or _held)
            for module in unit.modules:
                self._watch(unit, module)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's values live off the device."""
        return parameter in self._unit_of

    def host_values(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The values where they live, of the part that this rank holds; None if elsewhere."""
        return self._host.values(parameter)

    def values_to_save(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The values on the host, of this rank's part; None if they are on the device.

        Those that live on the disk are read: a state dict of a model needs memory for all of it.

        Raises:
            DiskError: they cannot be read.
        """
        if self.on_disk is not None and self.on_disk.has(parameter):
            return self.on_disk.read(parameter)
        return self.host_values(parameter)

    def use(self, unit: Unit) -> None:
        """A forward or backward of `unit` begins: it is on the device when this returns.

        Raises:
            torch.OutOfMemoryError: there is no room; what is there stays usable.
            DiskError: it cannot be read; a next use tries again.
        """
        if unit not in self._visitors:
            return
        ahead: list[Unit] = []
        if unit is not self._current:
            ahead = self._route.ahead(self._current, unit, self._prefetch)
            self._current = unit
            self._give_up_all_but({unit, *ahead})
        self._fetch(unit)
        for other in filter(self.is_final, ahead):
            self._fetch(other)
        if self._visitors[unit].are_here:
            self._visitors[unit].order()

    def bring(self, parameter: nn.Parameter) -> None:
        """Have the parameter's values on the device, for somebody who changes them there."""
        if parameter in self._unit_of:
            self.release()
            self._visitors[self._unit_of[parameter]].bring(parameter)

    def take_back(self, parameter: nn.Parameter) -> None:
        """Make what is on the device the parameter's values, after `bring`.

        Raises:
            DiskError: they cannot be written.
        """
        if parameter in self._unit_of:
            self._visitors[self._unit_of[parameter]].take_back(parameter)

    def release(self) -> None:
        """Give up everything: the values may be changed where they live when this returns."""
        self._current = None
        self._give_up_all_but(set())

    def _give_up_all_but(self, wanted: set[Unit]) -> None:
        for unit, visitors in self._visitors.items():
            if visitors.are_here and unit not in wanted:
                visitors.free()

    def _fetch(self, unit: Unit) -> None:
        """Set it on its way, unless it is there or has been gathered from all ranks."""
        if not self._visitors[unit].are_here and not self._is_gathered(unit):
            self._visitors[unit].fetch()

    def _is_gathered(self, unit: Unit) -> bool:
        """Whether FSDP2 has put whole parameters into the places of the shards."""
        module, name, parameter = self._slots[unit]
        return getattr(module, name) is not parameter

    def _watch(self, unit: Unit, module: nn.Module) -> None:
        """See the module's backward begin, and its shards being gathered."""
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_FetchingAllGather(partial(self._before_gather, unit)))
        if _reads_in_backward(module):
            # First, so that what FSDP2 does when backward begins comes later.
            module.register_forward_hook(partial(self._forward_ends, unit), prepend=True)

    def _forward_ends(self, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
        """Before the gradient of what the module has made is used, it is fetched again.

        An output layer that passes its input through (chunked loss) has no backward.
        """
        given = {id(tensor) for tensor in _tensors(inputs)}
        for tensor in _tensors(output):
            if tensor.requires_grad and id(tensor) not in given:
                tensor.register_hook(partial(self._backward_begins, unit))

    def _backward_begins(self, unit: Unit, gradient: torch.Tensor) -> None:
        self.use(unit)

    def _before_gather(self, unit: Unit) -> None:
        """FSDP2 is about to read the shards, on the stream that is current now."""
        self._fetch(unit)
        self._visitors[unit].read_on_current_stream()


class _Route:
    """The order in which a forward and the backward after it come to units.

    Args:
        units: in the order of forward; one that several modules share comes at its end once more.
        around: those around the others, with which both begin.
    """

    def __init__(self, units: Sequence[Unit], around: set[Unit]) -> None:
        outer = [unit for unit in units if unit in around]
        inner = [unit for unit in units if unit not in around]
        inner += [unit for unit in inner if len(unit.modules) > 1]
        backward = inner[::-1]
        while backward and not _reads_in_backward(backward[-1].modules[0]):
            backward.pop()
        self._stations = [*outer, *inner, *outer, *backward]
        self._stops: dict[Unit, list[int]] = {}
        for stop, unit in enumerate(self._stations):
            self._stops.setdefault(unit, []).append(stop)

    def ahead(self, before: Unit | None, unit: Unit, count: int) -> list[Unit]:
        """The next `count` units after `unit`, to which one came from `before`.

        A guess: where a model leaves layers out or comes back to them, others are next.
        """
        stops = self._stops[unit]
        stop = next((s for s in stops if s and self._stations[s - 1] is before), stops[0])
        following = dict.fromkeys(self._stations[stop + 1 :])
        following.pop(unit, None)
        return list(following)[:count]


class _FetchingAllGather(BookedAllGather):
    """FSDP2's gather, which sees to it that there is something to gather."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialised buffer; next, on the same stream, FSDP2 copies the shards into it."""
        self._before()
        return super().allocate(size, dtype=dtype, device=device)


def _sharding_root(units: Sequence[Unit]) -> Any:
    """FSDP2's outermost module where parameters are shards, else None."""
    return next((m for unit in units for m in unit.modules if isinstance(m, FSDPModule)), None)


def _surrounds(unit: Unit, units: Sequence[Unit]) -> bool:
    """Whether one of its modules has one of another unit inside."""
    inside = {inner for module in unit.modules for inner in module.modules()}
    return any(module in inside for other in units if other is not unit for module in other.modules)


def _slot(unit: Unit) -> tuple[nn.Module, str, nn.Parameter]:
    """Where one of its parameters is registered."""
    wanted = unit.parameters[0]
    for module in unit.modules:
        for inner in module.modules():
            for name, parameter in inner.named_parameters(recurse=False):
                if parameter is wanted:
                    return inner, name, wanted
    raise AssertionError(f"the modules of {unit.name} do not have its parameters")


def _reads_in_backward(module: nn.Module) -> bool:
    """Whether its backward needs its parameters' values; an embedding's needs the indices only."""
    return not isinstance(module, nn.Embedding)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in what a module takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _always(unit: Unit) -> bool:
    return True


def _held(parameter: nn.Parameter) -> torch.Tensor:
    return local_part(parameter).data
