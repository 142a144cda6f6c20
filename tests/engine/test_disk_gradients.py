"""Gradients on the disk against those that autograd adds up, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.on_disk import CPU, PIECE, SHAPES, backward, make_parameters, small_pieces
from tests.engine.postponed import PostponedTransfer
from torch import nn

from tightfit.bill.on_disk import spans
from tightfit.bill.table import Kind, Phase
from tightfit.engine.disk import DiskError
from tightfit.engine.disk_gradients import DiskGradients
from tightfit.engine.pipeline import DiskTier, ReadAhead
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer
from tightfit.ledger import Ledger
from tightfit.policies import Tier

__all__ = ["small_pieces"]
pytestmark = pytest.mark.usefixtures("small_pieces")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Store:
    """A store with its tier."""

    def __init__(
        self, parameters: list[nn.Parameter], folder: Path, transfer: Transfer | None = None
    ) -> None:
        self.disk = DiskTier(folder)
        slab = HostSlab(CPU)
        self.gradients = DiskGradients(parameters, transfer or PostponedTransfer(CPU), self.disk)
        self.disk.buffers.reserve(slab)
        slab.allocate()

    def read(self) -> dict[nn.Parameter, torch.Tensor]:
        """All gradients, from the disk."""
        return {parameter: self._read(parameter) for parameter in self.gradients.take()}

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        place = self.gradients.take()[parameter]
        runs = spans(parameter.numel())
        ahead = ReadAhead(self.disk.buffers, [[place.part(*run, 0)] for run in runs])
        found = torch.empty(parameter.numel(), dtype=place.dtype)
        for begin, end in runs:
            with ahead.piece() as use:
                found[begin:end] = place.values(use.buffer, begin, end)
        return found.view(parameter.shape)


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    """Closed at the end."""
    made: list[Store] = []
    yield made
    for store in made:
        store.disk.close()


def micro_batch(seed: int, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]


@TYPES
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_sums_and_norms_are_those_of_autograd(
    micro_batches: int, dtype: torch.dtype, tmp_path: Path, stores: list[Store]
) -> None:
    """Of two steps; in some micro-batches some parameters have no gradient."""
    parameters, plain = make_parameters(dtype), make_parameters(dtype)
    stores.append(Store(parameters, tmp_path))
    store = stores[0]
    for step in range(2):
        for index in range(micro_batches):
            gradients = micro_batch(10 * step + index, parameters)
            present = [i for i in range(len(parameters)) if i != 3 and (i + index) % 4]
            for group in (parameters, plain):
                backward([group[i] for i in present], [gradients[i] for i in present])
            assert all(parameter.grad is None for parameter in parameters)
        found = store.read()
        wanted = {p: q.grad for p, q in zip(parameters, plain, strict=True) if q.grad is not None}
        assert list(found) == list(wanted)
        for parameter, gradient in wanted.items():
            assert torch.equal(found[parameter], gradient)
        norms = store.gradients.norms()
        assert list(norms) == list(wanted)
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        own = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in wanted.values()]
        assert torch.equal(total, torch.linalg.vector_norm(torch.stack(own)))
        if dtype is torch.float32:
            assert torch.equal(total, nn.utils.get_total_norm(list(wanted.values())))
        store.gradients.clear()
        for parameter in plain:
            parameter.grad = None
        assert store.gradients.take() == {}
        assert store.gradients.norms() == {}


@TYPES
def test_a_norm_of_norms_is_the_total_norm_of_large_gradients(
    dtype: torch.dtype, tmp_path: Path, stores: list[Store]
) -> None:
    """Where torch's sums are split among vectors and, with more threads, ranges."""
    parameters = make_parameters(dtype, ((300, 1111), (70001,), (3,)))
    stores.append(Store(parameters, tmp_path))
    gradients = [1e3 * gradient for gradient in micro_batch(0, parameters)]
    backward(parameters, gradients)
    norms = stores[0].gradients.norms().values()
    wide = [gradient.float() for gradient in gradients]
    total = torch.linalg.vector_norm(torch.stack(list(norms)))
    if dtype is torch.float32:
        assert torch.equal(total, nn.utils.get_total_norm(wide))
    assert float(total) == pytest.approx(float(nn.utils.get_total_norm(wide)), rel=1e-5)


def test_a_backward_that_fails_midway_is_forgotten(tmp_path: Path, stores: list[Store]) -> None:
    """Its gradients do not come back in the next step's, and no buffer is missing."""
    parameters = make_parameters(torch.float32)
    stores.append(Store(parameters, tmp_path))
    for _ in range(4):
        backward(parameters, micro_batch(0, parameters))
        parameters[5].grad = torch.ones_like(parameters[5])  # left by an operation that failed
        stores[0].gradients.clear()
        assert parameters[5].grad is None
    gradients = micro_batch(1, parameters)
    backward(parameters, gradients)
    found = stores[0].read()
    assert all(torch.equal(found[p], g) for p, g in zip(parameters, gradients, strict=True))


def fail(monkeypatch: pytest.MonkeyPatch, verb: str, failing: int) -> None:
    """Let one of the disk's requests fail."""
    plain, seen = getattr(os, verb), []

    def request(*args: object) -> int:
        seen.append(args)
        if len(seen) == failing + 1:
            raise OSError(5, "Input/output error")
        return int(plain(*args))

    monkeypatch.setattr(os, verb, request)


def two_micro_batches(parameters: list[nn.Parameter], gradients: DiskGradients) -> None:
    for seed in range(2):
        backward(parameters, micro_batch(seed, parameters))
    gradients.take()


@pytest.mark.parametrize(("verb", "requests"), [("preadv", 10), ("pwritev", 20)])
def test_a_failing_disk_is_told_and_the_next_step_works(
    verb: str, requests: int, tmp_path: Path, stores: list[Store]
) -> None:
    """At each request of two micro-batches: ten pieces written, read, written again."""
    parameters = make_parameters(torch.float32)
    assert sum(len(spans(parameter.numel())) for parameter in parameters) == 10
    stores.append(Store(parameters, tmp_path))
    gradients = stores[0].gradients
    for failing in range(requests):
        with pytest.MonkeyPatch.context() as patch:
            fail(patch, verb, failing)
            with pytest.raises(DiskError, match="Input/output error"):
                two_micro_batches(parameters, gradients)
            gradients.clear()
    batch = micro_batch(2, parameters)
    backward(parameters, batch)
    found = stores[0].read()
    assert all(torch.equal(found[p], g) for p, g in zip(parameters, batch, strict=True))


def test_nothing_stays_in_memory(tmp_path: Path, stores: list[Store]) -> None:
    """The device has one gradient at a time and a piece of a sum, the host six buffers."""
    parameters = make_parameters(torch.float32, ((20, PIECE), (20, PIECE), (5, PIECE)))
    largest = 4 * 20 * PIECE
    with Ledger() as counted:
        for parameter in parameters:
            counted.mark(parameter, Kind.PARAMETERS)
        stores.append(Store(parameters, tmp_path, Transfer(CPU)))
        assert counted.kinds(Tier.NVME) == {Kind.GRADIENTS: 4 * 45 * PIECE}
        counted.set_section(Phase.BACKWARD)
        for _ in range(2):
            for parameter in parameters:
                (parameter * 2.0).sum().backward()  # autograd frees what it made as it goes
        peaks = counted.sections()[Phase.BACKWARD, ""]
        assert peaks[Tier.HOST] == {Kind.TRANSFER: 6 * 4 * PIECE}
        assert peaks[Tier.DEVICE][Kind.PARAMETERS] == 4 * 45 * PIECE
        assert peaks[Tier.DEVICE].get(Kind.GRADIENTS, 0) <= largest
        assert peaks[Tier.DEVICE].get(Kind.TRANSFER, 0) <= 4 * PIECE
        assert sum(counted.kinds(Tier.DEVICE).values()) <= 4 * 45 * PIECE + 64


def test_fewer_bytes_for_16_bits(tmp_path: Path, stores: list[Store]) -> None:
    parameters = make_parameters(torch.bfloat16, SHAPES)
    with Ledger() as counted:
        stores.append(Store(parameters, tmp_path))
        blocks = sum(-(-2 * parameter.numel() // 4096) for parameter in parameters)
        assert counted.kinds(Tier.NVME) == {Kind.GRADIENTS: 4096 * blocks}
