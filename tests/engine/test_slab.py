"""One slab: exact sizes, aligned tensors that keep it alive, and the refusals of real limits."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightfit.bill.table import Kind
from tightfit.dry_run.fakes import fake_tensors
from tightfit.engine import slab as module
from tightfit.engine.slab import HUGE_PAGE_BYTES, HostSlab, memory_of
from tightfit.errors import DoesNotFitError
from tightfit.facts.hardware import Hardware
from tightfit.ledger import Ledger
from tightfit.policies import Tier
from tightfit.units import MIB

CPU, CARD = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.int64)

Shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
Reservations = st.lists(
    st.tuples(Shapes, st.sampled_from(DTYPES), st.sampled_from([1, 64, 4096])), max_size=8
)


@given(Reservations)
def test_tensors_are_aligned_apart_and_as_large_as_asked_for(
    asked: list[tuple[tuple[int, ...], torch.dtype, int]],
) -> None:
    slab = HostSlab(CPU)
    places = [slab.reserve(s, d, Kind.GRADIENTS, align=max(a, d.itemsize)) for s, d, a in asked]
    slab.allocate()
    for number, (place, (shape, dtype, align)) in enumerate(zip(places, asked, strict=True)):
        tensor = place.tensor
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == place.size_bytes
        assert tensor.numel() == 0 or tensor.data_ptr() % align == 0
        tensor.fill_(number)
    assert all(bool((place.tensor == number).all()) for number, place in enumerate(places))
    payload = sum(place.size_bytes for place in places)
    assert payload <= slab.size_bytes < payload + sum(a for *_, a in asked) + 2 * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("count_bytes", "taken_bytes"),
    [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (3 * MIB + 1, 3 * MIB + 4096)],
)
def test_the_size_is_rounded_to_pages_and_no_further(count_bytes: int, taken_bytes: int) -> None:
    slab = HostSlab(CPU)
    slab.reserve((count_bytes,), torch.uint8, Kind.GRADIENTS)
    assert slab.size_bytes == taken_bytes


def test_the_ledger_counts_each_tensor_as_what_it_is_for() -> None:
    with Ledger() as counting:
        slab = HostSlab(CPU)
        gradient = slab.reserve((3, 5), torch.bfloat16, Kind.GRADIENTS)
        slab.reserve((7,), torch.float32, Kind.OPTIMIZER_STATES)
        slab.reserve((0,), torch.float32, Kind.MASTER_WEIGHTS)
        assert counting.kinds(Tier.HOST) == {}
        slab.allocate()
        expected = {Kind.GRADIENTS: 30, Kind.OPTIMIZER_STATES: 28}
        assert counting.kinds(Tier.HOST) == expected
        gradient.tensor.fill_(1)
        assert counting.kinds(Tier.HOST) == expected
        del gradient, slab
        assert counting.kinds(Tier.HOST) == {}
        assert counting.kinds(Tier.DEVICE) == {}


def test_a_dry_run_counts_the_same_bytes() -> None:
    with fake_tensors(), Ledger() as counting:
        slab = HostSlab(CPU)
        place = slab.reserve((1000, 3), torch.bfloat16, Kind.GRADIENTS)
        slab.allocate()
        assert isinstance(place.tensor, torch._subclasses.FakeTensor)
        assert counting.kinds(Tier.HOST) == {Kind.GRADIENTS: 6000}


def test_a_tensor_keeps_the_memory_alive() -> None:
    slab = HostSlab(CPU)
    place = slab.reserve((5,), torch.float32, Kind.GRADIENTS)
    slab.allocate()
    tensor = place.tensor
    tensor.fill_(3)
    del slab, place
    gc.collect()
    assert tensor.tolist() == [3] * 5


def test_nothing_is_reserved_too_late_or_read_too_early() -> None:
    slab = HostSlab(CPU)
    place = slab.reserve((5,), torch.float32, Kind.GRADIENTS)
    with pytest.raises(AssertionError, match="has not been allocated"):
        _ = place.tensor
    slab.allocate()
    with pytest.raises(AssertionError, match="after the slab was allocated"):
        slab.reserve((5,), torch.float32, Kind.GRADIENTS)
    with pytest.raises(AssertionError, match="twice"):
        slab.allocate()


def test_the_memory_of_a_tensor_is_its_bytes() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    memory = memory_of(tensor)
    assert bytes(memory) == b"\x80\x3f\x00\xc0"
    memory[0:2] = b"\x00\x40"
    assert tensor.tolist() == [2, -2]
    assert len(memory_of(torch.zeros(0))) == 0
    with pytest.raises(AssertionError):
        memory_of(torch.zeros(2, 2).t())


class Runtime:
    """Stands for the CUDA runtime: locks memory, or says no."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.locked: dict[int, int] = {}
        self.readable_at_unlock: list[bool] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if self.result == 0:
            self.locked[address] = size_bytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        size_bytes = self.locked.pop(address)
        self.readable_at_unlock.append(_is_mapped(address, size_bytes))
        return 0

    def cudaGetErrorString(self, result: int) -> str:  # noqa: N802
        return {2: "out of memory"}[result]


def _is_mapped(address: int, size_bytes: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address and address + size_bytes <= end:
            return True
    return False


def test_with_a_card_the_slab_is_locked_once_for_as_long_as_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with Ledger() as counting:
        slab = HostSlab(CARD)
        places = [slab.reserve((3 * MIB,), torch.uint8, Kind.GRADIENTS) for _ in range(2)]
        slab.allocate()
        assert counting.kinds(Tier.PINNED) == {Kind.GRADIENTS: 6 * MIB}
        assert counting.kinds(Tier.HOST) == {}
    begin = places[0].tensor.data_ptr()
    assert runtime.locked == {begin: 6 * MIB}  # one piece, exactly, of no power of two
    assert begin % HUGE_PAGE_BYTES == 0
    last = places[1].tensor
    del slab, places
    gc.collect()
    assert runtime.locked
    del last
    gc.collect()
    assert not runtime.locked
    assert runtime.readable_at_unlock == [True]  # unlocked first, then unmapped


@pytest.mark.skipif(sys.platform != "linux", reason="advice that Linux takes")
def test_a_forked_child_has_pages_of_its_own_and_unlocks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slab = HostSlab(CARD)
    places = [slab.reserve((3 * MIB,), torch.uint8, Kind.GRADIENTS)]
    slab.allocate()
    address = places[0].tensor.fill_(7).data_ptr()
    # Where the child had nothing, its own memory would be unmapped with what it inherits.
    child = os.fork()
    if child == 0:
        fresh = _is_mapped(address, 3 * MIB) and memory_of(places[0].tensor) == bytes(3 * MIB)
        del slab, places
        gc.collect()
        os._exit(0 if fresh and runtime.locked else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((places[0].tensor == 7).all())
    del slab, places
    gc.collect()
    assert not runtime.locked


@pytest.mark.parametrize(
    ("limit_bytes", "told", "missing_bytes"),
    [(MIB, "limited to 1.0 MiB", 2 * MIB), (None, "not limited", 3 * MIB)],
)
def test_a_refused_lock_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None, told: str, missing_bytes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(result=2))
    monkeypatch.setattr(module, "_limit_bytes", {"RLIMIT_MEMLOCK": limit_bytes}.get)
    slab = HostSlab(CARD)
    slab.reserve((3 * MIB,), torch.uint8, Kind.GRADIENTS)
    with pytest.raises(DoesNotFitError) as caught:
        slab.allocate()
    message = str(caught.value)
    for words in ("3.0 MiB", "out of memory", told, "ulimit -l unlimited", "optimizer_fraction"):
        assert words in message
    assert caught.value.missing_bytes == missing_bytes


def test_a_refused_lock_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(result=2))
    mappings: list[weakref.ref[Any]] = []
    plain: Callable[[int], Any] = module._map

    def remember(size_bytes: int) -> Any:
        mapping = plain(size_bytes)
        mappings.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(module, "_map", remember)
    slab = HostSlab(CARD)
    slab.reserve((3 * MIB,), torch.uint8, Kind.GRADIENTS)
    with pytest.raises(DoesNotFitError):
        slab.allocate()
    gc.collect()
    assert mappings[0]() is None


def test_more_than_the_available_ram_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 5 * MIB

    def small_machine(folder: Path, readers: Any) -> Hardware:
        assert readers.nvml() is None  # no driver is asked
        return Hardware("cpu", 1, 8 * MIB, available, disk=None)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "detect_hardware", small_machine)
    slab = HostSlab(CPU)
    slab.reserve((available,), torch.uint8, Kind.GRADIENTS)
    slab.allocate()
    slab = HostSlab(CPU)
    slab.reserve((available + 1,), torch.uint8, Kind.GRADIENTS)
    with pytest.raises(DoesNotFitError, match=r"5\.0 MiB of RAM are available.*nvme") as caught:
        slab.allocate()
    assert caught.value.missing_bytes == mmap.PAGESIZE


UNDER_A_LIMIT = """
import resource, torch
from tightfit.bill.table import Kind
from tightfit.engine.slab import HostSlab
from tightfit.errors import DoesNotFitError

taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, taken + 2**30))
slab = HostSlab(torch.device("cpu"))
slab.reserve((2**31,), torch.uint8, Kind.GRADIENTS)
try:
    slab.allocate()
except DoesNotFitError as error:
    print(error)
slab = HostSlab(torch.device("cpu"))
place = slab.reserve((2**20,), torch.uint8, Kind.GRADIENTS)
slab.allocate()
print("goes on:", int(place.tensor.fill_(1).sum()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space has no limit elsewhere")
def test_a_limited_address_space_is_named_and_the_process_goes_on() -> None:
    run = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=True
    )
    refused, after = run.stdout.splitlines()
    assert "no room for 2.00 GiB" in refused
    assert "ulimit -v" in refused
    assert "optimizer_fraction" in refused
    assert after == "goes on: 1048576"
