"""Parameters whose values live on the host and are on the device between `fetch` and `free`.

Their tensors stay what they are: keys, shapes, and views that autograd has saved; only the memory
behind them comes and goes, and the ledger books it as it does. Knows neither units nor when
anybody computes.

On a card nothing here waits. Memory is taken and given back by the stream that is current, the one
that computes, and torch's allocator hands it on in the order of that stream:

- what computed before with the memory that `fetch` takes comes before the copy into it, since
  `Transfer.copy` begins after what the stream was given so far;
- `free` is called when the stream has been given all that reads the values, and gives it the wait
  for the copy first, so that whoever gets the memory next comes after both;
- another stream that reads (`read_on_current_stream`) is waited for by then as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.slab import HostSlab, Reserved
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.ledger import local_part
from tightfit.policies import Tier


class Visitors:
    """Parameters that are fetched and freed together; of a DTensor, the part of this rank.

    Args:
        parameters: nobody else may hold their storages.
        slab: where their values will live; nothing else happens before `adopt`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], transfer: Transfer, slab: HostSlab
    ) -> None:
        self._transfer = transfer
        self._homes: dict[nn.Parameter, Reserved] = {}
        for parameter in parameters:
            local = local_part(parameter)
            if local.numel():  # of few rows, some ranks hold none
                self._homes[parameter] = slab.reserve(local.shape, local.dtype, Kind.PARAMETERS)
        self._storage_bytes: dict[nn.Parameter, int] = {}  # a shard's has padding
        self._arrivals: list[Arrival] = []
        self._reader: torch.cuda.Stream | None = None
        self._used = False
        self.are_here = False

    def adopt(self) -> None:
        """Move the values to the host; the slab has been allocated."""
        for parameter, home in self._homes.items():
            self._transfer.copy(home.tensor, local_part(parameter).data).wait()
            _ensure_own_storage(parameter, self._transfer.device)
            storage = local_part(parameter).untyped_storage()
            self._storage_bytes[parameter] = storage.nbytes()
            storage.resize_(0)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that come and go."""
        return list(self._homes)

    def host_values(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where the values of one of them live; None of others."""
        home = self._homes.get(parameter)
        return None if home is None else home.tensor

    def fetch(self) -> None:
        """Take memory on the device and begin to copy.

        Raises:
            torch.OutOfMemoryError: there is none; what was taken is given back.
        """
        with ExitStack() as undo:
            undo.callback(self.free)
            for parameter, home in self._homes.items():
                local = local_part(parameter)
                ledger.mark(local, Kind.PARAMETERS, Tier.DEVICE)
                local.untyped_storage().resize_(self._storage_bytes[parameter])
                # `data` has a version of its own: what autograd has saved gets the values back
                # that it was saved with, which is no change, whenever the copy is done.
                self._arrivals.append(self._transfer.copy(local.data, home.tensor))
            undo.pop_all()
        self.are_here = True

    def order(self) -> None:
        """Let the current stream find the values from now on."""
        self._used = True
        for arrival in self._arrivals:
            arrival.order()

    def read_on_current_stream(self) -> None:
        """`order` for a stream that is not the one that computes; `free` waits for it."""
        self.order()
        if self._transfer.device.type == "cuda":
            self._reader = torch.cuda.current_stream(self._transfer.device)

    def free(self) -> None:
        """Give the memory back to the stream that computes."""
        for arrival in self._arrivals:
            if self._used:
                arrival.order()
            else:
                arrival.wait()  # nobody else will, and the host's values may change next
        if self._reader is not None:
            torch.cuda.current_stream(self._transfer.device).wait_stream(self._reader)
        for parameter in self._homes:
            local_part(parameter).untyped_storage().resize_(0)
        self._arrivals.clear()
        self._reader = None
        self.are_here = self._used = False


def _ensure_own_storage(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter that is loaded elsewhere, or is part of something larger, memory of its own.

    Its values, which are lost, have been copied. FSDP2's shards have theirs and are held by it.
    """
    if isinstance(parameter, DTensor):
        return
    storage = parameter.untyped_storage()
    own = storage.resizable() and storage.nbytes() == parameter.numel() * parameter.element_size()
    if not own or parameter.device != device:
        with ledger.labelled(Kind.PARAMETERS):
            parameter.data = torch.empty_like(parameter, device=device)
