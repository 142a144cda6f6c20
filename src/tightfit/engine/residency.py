"""Parameters whose values live elsewhere and are on the device between `fetch` and `free`.

Their tensors stay what they are: keys, shapes, and views that autograd has saved; only the memory
behind them comes and goes, and the ledger books it as it does. In between they read as NaN. Knows
neither units nor when anybody computes, and of where values live only that they can be sent from
there.

On a card nothing here waits, but for a disk. Memory is taken and given back by the stream that is
current, the one that computes, and torch's allocator hands it on in the order of that stream:

- what computed before with the memory that `fetch` takes comes before the copy into it, since
  `Transfer.copy` begins after what the stream was given so far;
- `free` is called when the stream has been given all that reads the values, and gives it the wait
  for the copy first, so that whoever gets the memory next comes after both;
- another stream that reads (`read_on_current_stream`) is waited for by then as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.mesh import is_shard
from tightfit.engine.slab import HostSlab, Reserved
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.errors import TrainingError
from tightfit.ledger import local_part
from tightfit.policies import Tier


class Home(Protocol):
    """Where the values of some parameters live; of a DTensor, of the part of this rank."""

    def adopt(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Take these values over, which may be anywhere."""
        ...

    def send(self, places: Mapping[nn.Parameter, torch.Tensor]) -> list[Arrival]:
        """Begin to copy values to memory on the device, of the parameters' shapes."""
        ...


class HostHome:
    """Values that live on the host.

    Args:
        parameters: whose values they will be.
        slab: where; nothing else happens before `adopt`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], transfer: Transfer, slab: HostSlab
    ) -> None:
        self._transfer = transfer
        self._reserved: dict[nn.Parameter, Reserved] = {
            p: slab.reserve(local_part(p).shape, p.dtype, Kind.PARAMETERS) for p in parameters
        }

    def values(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The values of one of them; None of others."""
        reserved = self._reserved.get(parameter)
        return None if reserved is None else reserved.tensor

    def adopt(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """See `Home.adopt`; the slab has been allocated."""
        self._transfer.copy(self._reserved[parameter].tensor, values).wait()

    def send(self, places: Mapping[nn.Parameter, torch.Tensor]) -> list[Arrival]:
        """See `Home.send`."""
        return [
            self._transfer.copy(place, self._reserved[parameter].tensor)
            for parameter, place in places.items()
        ]


class Visitors:
    """Parameters that are fetched and freed together; of a DTensor, the part of this rank.

    Args:
        homes: where the values of each will live, once they are adopted. Nobody else may hold the
            parameters' storages.
    """

    def __init__(self, homes: Mapping[nn.Parameter, Home], transfer: Transfer) -> None:
        self._transfer = transfer
        self._homes = homes
        self._places: dict[nn.Parameter, torch.Tensor] = {}  # on the device, with memory or not
        self._storage_bytes: dict[nn.Parameter, int] = {}  # a shard's has padding
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        self._arrivals: list[Arrival] = []
        self._reader: torch.cuda.Stream | None = None
        self._used = False
        self.are_here = False

    def adopt(self, values: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Move the values to where they will live, one parameter after the other.

        Args:
            values: those of a parameter now, of the part of this rank.
        """
        for parameter, home in self._homes.items():
            home.adopt(parameter, values(parameter))
            _ensure_own_storage(parameter, self._transfer.device)
            place = local_part(parameter).data
            self._places[parameter] = place
            self._storage_bytes[parameter] = place.untyped_storage().nbytes()
            self._give_memory_back(parameter)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that come and go."""
        return list(self._homes)

    def fetch(self) -> None:
        """Take memory on the device and begin to copy.

        Raises:
            torch.OutOfMemoryError: there is none; what was taken is given back.
        """
        with ExitStack() as undo:
            undo.callback(self.free)
            places = {parameter: self._take_memory(parameter) for parameter in self._homes}
            for home in dict.fromkeys(self._homes.values()):
                its_own = {p: place for p, place in places.items() if self._homes[p] is home}
                self._arrivals += home.send(its_own)
            undo.pop_all()
        self.are_here = True

    def _take_memory(self, parameter: nn.Parameter) -> torch.Tensor:
        """Memory on the device for a parameter.

        `data` has a version of its own: what autograd has saved gets the values back that it was
        saved with, which is no change, whenever the copy is done.
        """
        place = self._places[parameter]
        ledger.mark(place, Kind.PARAMETERS, Tier.DEVICE)
        place.untyped_storage().resize_(self._storage_bytes[parameter])
        _show(parameter, place)
        return place

    def _give_memory_back(self, parameter: nn.Parameter) -> None:
        """Leave a parameter without memory, and with NaN for whoever reads it all the same.

        torch does not check and would read what is not there.
        """
        place = self._places[parameter]
        place.untyped_storage().resize_(0)
        _show(parameter, self._nothing_like(parameter).expand(place.shape))

    def _nothing_like(self, parameter: nn.Parameter) -> torch.Tensor:
        """A value that stands for none, on the device."""
        if parameter.dtype not in self._nothing:
            value = torch.nan if parameter.dtype.is_floating_point else 0
            with ledger.labelled(Kind.BUFFERS, Tier.DEVICE):
                self._nothing[parameter.dtype] = torch.full(
                    (), value, dtype=parameter.dtype, device=self._transfer.device
                )
        return self._nothing[parameter.dtype]

    def bring(self, parameter: nn.Parameter) -> None:
        """Have one of them on the device, for somebody who changes it there; the others are not."""
        for arrival in self._homes[parameter].send({parameter: self._take_memory(parameter)}):
            arrival.wait()

    def take_back(self, parameter: nn.Parameter) -> None:
        """Make what is on the device the parameter's values, after `bring`."""
        self._homes[parameter].adopt(parameter, self._places[parameter])
        self._give_memory_back(parameter)

    def order(self) -> None:
        """Let the current stream find the values from now on.

        Raises:
            DiskError: they cannot be read; they are given up.
        """
        self._used = True
        try:
            for arrival in self._arrivals:
                arrival.order()
        except TrainingError:
            self.free()
            raise

    def read_on_current_stream(self) -> None:
        """`order` for a stream that is not the one that computes; `free` waits for it."""
        self.order()
        if self._transfer.device.type == "cuda":
            self._reader = torch.cuda.current_stream(self._transfer.device)

    def free(self) -> None:
        """Give the memory back to the stream that computes."""
        for arrival in self._arrivals:
            with suppress(TrainingError):  # told to whoever has used it
                if self._used:
                    arrival.order()
                else:
                    arrival.wait()  # nobody else will, and the values may change next
        if self._reader is not None:
            torch.cuda.current_stream(self._transfer.device).wait_stream(self._reader)
        for parameter in self._homes:
            self._give_memory_back(parameter)
        self._arrivals.clear()
        self._reader = None
        self.are_here = self._used = False


def _ensure_own_storage(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter memory of its own: it may be loaded elsewhere, be part of something larger,
    or of a file that is mapped.

    Its values, which are lost, have been copied. FSDP2's shards have theirs and are held by it.
    """
    if is_shard(parameter):
        return
    part = local_part(parameter)
    with ledger.labelled(Kind.PARAMETERS):
        own = torch.empty(part.shape, dtype=part.dtype, device=device)
    if isinstance(parameter, DTensor):  # says on which device it is
        parameter.data = DTensor(own, parameter._spec, requires_grad=False)
    _show(parameter, own)


def _show(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter have these values, of a DTensor the part of this rank.

    FSDP2 gathers a shard from memory that it holds itself, which is that of `fetch`. What autograd
    saves of them has a version of its own, as it has of any parameter's `data`.
    """
    if isinstance(parameter, DTensor):
        parameter._local_tensor = values.data
    else:
        parameter.data = values
