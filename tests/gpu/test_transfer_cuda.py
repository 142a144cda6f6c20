"""Copies on a card: every order that the rule asks for is kept, and each one left out is seen.

The compute stream is held up by a kernel that only spins, so that whoever does not wait comes too
early; memory holds NaN until it is written in the order of a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tightfit.bill.table import Kind
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer
from tightfit.ledger import Ledger
from tightfit.policies import Tier
from tightfit.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VALUES = 16 * MIB // 4  # of fp32 in one tensor
SPIN_CYCLES = 2**30  # about half a second; a copy of a tensor takes about a millisecond


@pytest.fixture
def transfer() -> Iterator[Transfer]:
    transfer = Transfer(torch.device("cuda"))
    yield transfer
    torch.cuda.synchronize()
    transfer.wait()


def on_host(*fills: float) -> list[torch.Tensor]:
    """Page-locked tensors from one slab."""
    slab = HostSlab(torch.device("cuda"))
    places = [slab.reserve((VALUES,), torch.float32, Kind.TRANSFER) for _ in fills]
    slab.allocate()
    return [place.tensor.fill_(value) for place, value in zip(places, fills, strict=True)]


def on_device(fill: float) -> torch.Tensor:
    tensor = torch.full((VALUES,), fill, device="cuda")
    torch.cuda.synchronize()
    return tensor


def hold_up() -> None:
    """Give the current stream so much to do that everybody else comes first."""
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


NAN = float("nan")


def test_a_slab_is_page_locked_and_as_large_as_asked_for() -> None:
    with Ledger(torch.device("cuda")) as counting:
        first, second = on_host(1, 2)
        assert counting.kinds(Tier.PINNED) == {Kind.TRANSFER: 8 * VALUES}
    assert first.is_pinned()
    assert second.is_pinned()
    assert second.data_ptr() - first.data_ptr() == 4 * VALUES


def test_slabs_come_and_go() -> None:
    """What was unlocked can be locked again, also at an address that was used before."""
    for _ in range(20):
        (tensor,) = on_host(1)
        assert tensor.is_pinned()
        del tensor


@pytest.mark.parametrize("ordered", [True, False])
def test_a_copy_to_the_host_comes_after_what_makes_its_source(
    transfer: Transfer, ordered: bool
) -> None:
    """Without the order the copy reads what was there before: the test sees the difference."""
    (host,) = on_host(0)
    source = on_device(NAN)
    hold_up()
    source.fill_(7)
    transfer.copy(host, source, ordered=ordered).wait()
    assert is_all(host, 7) is ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_a_copy_to_the_device_comes_after_who_still_reads_its_destination(
    transfer: Transfer, ordered: bool
) -> None:
    (host,) = on_host(7)
    destination = on_device(3)
    hold_up()
    seen = destination.clone()
    arrival = transfer.copy(destination, host, ordered=ordered)
    arrival.order()
    after = destination.clone()
    torch.cuda.synchronize()
    assert is_all(seen, 3) is ordered
    assert is_all(after, 7)


@pytest.mark.parametrize("waits", [True, False])
def test_who_orders_an_arrival_reads_what_arrived(transfer: Transfer, waits: bool) -> None:
    """The copies' stream is held up here, by a copy that is ordered after a spinning kernel."""
    (host, other_host) = on_host(7, 7)
    destination, other = on_device(NAN), on_device(NAN)
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        hold_up()
        transfer.copy(other, other_host)
    arrival = transfer.copy(destination, host)
    if waits:
        arrival.order()
    seen = destination.clone()
    torch.cuda.synchronize()
    assert is_all(seen, 7) is waits


def test_order_does_not_hold_up_the_host(transfer: Transfer) -> None:
    (host,) = on_host(7)
    destination = on_device(NAN)
    hold_up()
    behind = torch.cuda.Event()
    behind.record()
    transfer.copy(destination, host).order()
    assert not behind.query()


@pytest.mark.parametrize("direction", ["to host", "to device"])
def test_wait_is_for_everything_in_both_directions(transfer: Transfer, direction: str) -> None:
    (host,) = on_host(5)
    device = on_device(7)
    hold_up()
    if direction == "to host":
        transfer.copy(host, device)
        transfer.wait()
        assert is_all(host, 7)
    else:
        transfer.copy(device, host)
        transfer.wait()
        host.fill_(NAN)  # what has left may be overwritten
        assert is_all(device, 5)


def _drop(arrival: object) -> None:
    """Nobody keeps the arrival."""


def _order(arrival: object) -> None:
    arrival.order()  # type: ignore[attr-defined]


@pytest.mark.parametrize("after", [_drop, _order])
def test_memory_that_is_given_up_is_not_given_away_too_early(
    transfer: Transfer, after: Callable[[object], None]
) -> None:
    (host,) = on_host(0)
    for value in range(20):
        source = torch.full((VALUES,), float(value), device="cuda")
        arrival = transfer.copy(host, source)
        after(arrival)
        del source, arrival
        torch.full((VALUES,), NAN, device="cuda")  # takes the memory if it is there to be taken
        transfer.wait()
        assert is_all(host, value)


def test_layers_that_come_and_go_take_no_more_memory_when_the_host_runs_ahead(
    transfer: Transfer,
) -> None:
    """The host gives out all the work before the card has begun: memory is used again in the
    order of the compute stream, not when the host sees that a copy is done."""
    layers, prefetch = 12, 1
    hosts = on_host(*range(layers))
    homes = [on_device(NAN) for _ in range(layers)]
    size_bytes = homes[0].untyped_storage().nbytes()
    results = [torch.empty(VALUES, device="cuda") for _ in range(layers)]
    for home in homes:
        home.untyped_storage().resize_(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hold_up()
    arrivals = {}

    def fetch(layer: int) -> None:
        if layer < layers and layer not in arrivals:
            homes[layer].untyped_storage().resize_(size_bytes)
            arrivals[layer] = transfer.copy(homes[layer], hosts[layer])

    for layer in range(layers):
        for ahead in range(prefetch + 1):
            fetch(layer + ahead)
        arrivals[layer].order()
        results[layer].copy_(homes[layer])
        homes[layer].untyped_storage().resize_(0)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == (1 + prefetch) * size_bytes
    torch.cuda.synchronize()
    assert all(is_all(result, layer) for layer, result in enumerate(results))


def test_a_buffer_that_goes_back_and_forth_carries_the_right_numbers(transfer: Transfer) -> None:
    """One host buffer, poisoned whenever nobody may rely on it; both directions in turn."""
    (host,) = on_host(NAN)
    device = on_device(0)
    for _ in range(50):
        device.add_(1)
        transfer.copy(host, device).wait()
        device.fill_(NAN)
        arrival = transfer.copy(device, host)
        arrival.order()
        device.add_(1)
        arrival.wait()
        host.fill_(NAN)
    assert is_all(device, 100)


def test_threads_copy_beside_the_compute_stream(transfer: Transfer) -> None:
    """As the worker of the lazy step does: to destinations that nobody computes with."""
    count = 4
    hosts, places = on_host(*range(count)), [on_device(NAN) for _ in range(count)]

    def work(number: int) -> None:
        transfer.copy(places[number], hosts[number], ordered=False).wait()

    hold_up()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(is_all(place, number) for number, place in enumerate(places))
