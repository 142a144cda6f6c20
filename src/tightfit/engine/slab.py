"""Host memory for what travels or is kept off the device: one piece, of exactly the size asked for.

First everybody reserves, then all of it is allocated and, with a card, page-locked at once: locking
is slow and must not happen within a step, and torch's own pinned memory is rounded up to powers of
two. Knows nothing of what is kept in it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch._guards import detect_fake_mode

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine import transfer
from tightfit.errors import DoesNotFitError
from tightfit.facts.hardware import Readers, detect_hardware
from tightfit.units import format_bytes

HUGE_PAGE_BYTES = 2**21  # where memory begins that can be huge pages, which disks and cards like
_MADV_WIPEONFORK = 18  # of <linux/mman.h>, from Linux 4.14; Python 3.11 has no name for it
_ADVICE = (
    "let less leave the device (a smaller offload_optimizer_fraction or offload_param_fraction, no "
    "offload_activations) or let it go to nvme"
)


class HostSlab:
    """Reserves host tensors, then allocates them all.

    Args:
        device: whose memory this stands beside; for a card it is page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved: list[Reserved] = []
        self._end_bytes = 0
        self._is_allocated = False

    def reserve(
        self, shape: Sequence[int], dtype: torch.dtype, kind: Kind, *, align: int = 64
    ) -> Reserved:
        """Promise a contiguous tensor of `shape`.

        Args:
            kind: as what the ledger counts it.
            align: bytes that its address is a multiple of; disk buffers take 4096.
        """
        assert not self._is_allocated, "reserved after the slab was allocated"
        assert HUGE_PAGE_BYTES % align == 0, "a power of two up to a huge page"
        offset = -(-self._end_bytes // align) * align
        reserved = Reserved(tuple(shape), dtype, kind, offset)
        self._reserved.append(reserved)
        self._end_bytes = offset + reserved.size_bytes
        return reserved

    @property
    def size_bytes(self) -> int:
        """What is reserved so far, in whole pages."""
        return -(-self._end_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def allocate(self) -> None:
        """Make the tensors that were reserved, uninitialised. Under a fake mode, fake ones.

        Raises:
            DoesNotFitError: neither RAM nor the limits on this process allow it.
        """
        assert not self._is_allocated, "allocated twice"
        self._is_allocated = True
        tier = transfer.host_tier_of(self._device)
        if detect_fake_mode() is not None:
            for reserved in self._reserved:
                with ledger.labelled(reserved.kind, tier):
                    reserved.place(torch.empty(reserved.shape, dtype=reserved.dtype))
            return
        memory = _allocate(self.size_bytes, locked=self._device.type == "cuda")
        for reserved in self._reserved:
            reserved.place(_tensor_in(memory, reserved))
            ledger.mark(reserved.tensor, reserved.kind, tier)


@dataclass(eq=False)
class Reserved:
    """A tensor of a slab, before and after there is memory for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    offset_bytes: int
    _tensor: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, with a storage of its own; only once the slab was allocated."""
        assert self._tensor is not None, "the slab has not been allocated"
        return self._tensor

    def place(self, tensor: torch.Tensor) -> None:
        """Say which tensor it is."""
        self._tensor = tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, to read and write; keep the tensor while it is used.

    torch's tensors offer no buffers themselves, and numpy's know no 16-bit brain floats.
    """
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    raw = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


class _Mapping(mmap.mmap):
    """A mapping that is unlocked before it is unmapped, when nobody uses it any more."""

    unlock: Callable[[], object] | None = None
    locked_by: int | None = None  # the process; children of a fork have locked nothing

    def __del__(self) -> None:
        if self.unlock is not None and self.locked_by == os.getpid():
            self.unlock()


def _allocate(size_bytes: int, *, locked: bool) -> memoryview:
    """Fresh memory that begins at a huge page.

    It is not touched here: locking does that, and so does the first use, which is no slower.
    """
    if size_bytes == 0:
        return memoryview(b"")
    _check_ram(size_bytes)
    mapping = _map(size_bytes + HUGE_PAGE_BYTES)  # what is never touched takes no memory
    _advise(mapping)
    begin = -_address_of(mapping) % HUGE_PAGE_BYTES
    memory = memoryview(mapping)[begin : begin + size_bytes]
    if locked:
        _lock(mapping, memory)
    return memory


def _advise(mapping: _Mapping) -> None:
    """Ask for huge pages, and that a forked child has fresh ones in their place.

    Shared ones would be copied at the next write, away from the card that has locked them. Nor may
    the child have none (`MADV_DONTFORK`): it would put something else there, and unmap that with
    the mapping that it inherits.
    """
    if sys.platform != "linux":
        return
    for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
        with suppress(OSError):  # a kernel without it
            mapping.madvise(advice)


def _map(size_bytes: int) -> _Mapping:
    try:
        if sys.platform == "win32":
            return _Mapping(-1, size_bytes)
        return _Mapping(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        limit = _limit_bytes("RLIMIT_AS")
        told = "" if limit is None else f", whose address space is limited to {_words(limit)}"
        raise DoesNotFitError(
            f"no room for {format_bytes(size_bytes)} of host memory in this process{told}: "
            f"raise the limit (`ulimit -v unlimited`), or {_ADVICE}",
            size_bytes,
        ) from error


def _words(limit_bytes: int) -> str:
    return f"{format_bytes(limit_bytes)} (`ulimit -v`)"


def _check_ram(size_bytes: int) -> None:
    """Refuse what the kernel would grant and then kill for.

    Raises:
        DoesNotFitError: less than that is available now.
    """
    readers = replace(Readers(), nvml=lambda: None)  # the cards do not matter here
    available = detect_hardware(Path.cwd(), readers).ram_available_bytes
    if size_bytes > available:
        raise DoesNotFitError(
            f"{format_bytes(size_bytes)} of host memory are needed for what is kept off the "
            f"device, and {format_bytes(available)} of RAM are available: end other programs, or "
            f"{_ADVICE}",
            size_bytes - available,
        )


def _lock(mapping: _Mapping, memory: memoryview) -> None:
    """Page-lock `memory` for the card until `mapping` is given up.

    Raises:
        DoesNotFitError: the driver or a limit forbids it.
    """
    runtime = torch.cuda.cudart()
    address, size_bytes = _address_of(memory), len(memory)
    result = runtime.cudaHostRegister(address, size_bytes, 0)
    if int(result) == 0:
        mapping.unlock = partial(runtime.cudaHostUnregister, address)
        mapping.locked_by = os.getpid()
        return
    limit = _limit_bytes("RLIMIT_MEMLOCK")
    told = "not limited" if limit is None else f"limited to {format_bytes(limit)}"
    raise DoesNotFitError(
        f"{format_bytes(size_bytes)} of host memory cannot be page-locked (cudaHostRegister: "
        f"{runtime.cudaGetErrorString(result)}); locked memory is {told} for this process: raise "
        f"the limit (`ulimit -l unlimited`), or {_ADVICE}",
        size_bytes if limit is None else max(0, size_bytes - limit),
    )


def _limit_bytes(name: str) -> int | None:
    """The soft limit of this process; None where there is none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _address_of(buffer: mmap.mmap | memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def _tensor_in(memory: memoryview, reserved: Reserved) -> torch.Tensor:
    """A tensor on its part of `memory`, which it keeps alive."""
    if reserved.size_bytes == 0:
        return torch.empty(reserved.shape, dtype=reserved.dtype)
    begin = reserved.offset_bytes
    part = memory[begin : begin + reserved.size_bytes]
    return torch.frombuffer(part, dtype=reserved.dtype).view(reserved.shape)
