"""Parameters on the disk: the numbers of others, in pieces, whatever fails and whoever is late."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.on_disk import CPU, PIECE, small_pieces
from tests.engine.postponed import PostponedTransfer
from tests.engine.test_disk_states import Faults
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from tightfit.bill.table import Kind
from tightfit.engine import apply
from tightfit.engine.apply import fit
from tightfit.engine.disk import DiskError
from tightfit.engine.disk_parameters import FETCH_BUFFERS, DiskParameters
from tightfit.engine.engine import Engine
from tightfit.engine.pipeline import DiskTier, InUse
from tightfit.engine.slab import HostSlab
from tightfit.engine.transfer import Transfer
from tightfit.errors import DoesNotFitError
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    Master,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    Tier,
)

__all__ = ["small_pieces"]
pytestmark = pytest.mark.usefixtures("small_pieces")

Make = Callable[..., LlamaForCausalLM]
MakeBatch = Callable[..., tuple[torch.Tensor, torch.Tensor]]
SIZES = {"hidden_size": 64, "intermediate_size": 300}  # matrices of three uneven pieces
HOST, NVME = Tier.HOST, Tier.NVME
NEAR = PlacementPolicy(HOST, HOST, HOST)
FAR = PlacementPolicy(NVME, NVME, NVME, lazy_step=True)


@pytest.fixture
def postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "Transfer", PostponedTransfer)


def train(engine: Engine, make_batch: MakeBatch, steps: int = 4, first: int = 0) -> list[float]:
    """Losses and norms."""
    seen = []
    for step in range(first, first + steps):
        loss = engine.loss(*make_batch(step), 30)
        engine.backward(loss)
        seen += [float(loss.detach()), engine.step()]
    engine.drain()
    return seen


def assert_same_model(first: nn.Module, second: nn.Module) -> None:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


LORA: dict[str, Any] = {"adapter": AdapterPolicy(rank=2)}
BF16: dict[str, Any] = {"precision": PrecisionPolicy("bf16")}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": OptimizerPolicy(weight_decay=0.1, max_grad_norm=0.5)},
    "sgd": {"optimizer": OptimizerPolicy(OptimizerName.SGD, 0.1)},
    "lion 8 bits": {"optimizer": OptimizerPolicy(OptimizerName.LION_8BIT, 1e-3)},
    "bf16": BF16,
    "bf16 sgd": {"optimizer": OptimizerPolicy(OptimizerName.SGD, 0.1), **BF16},
    "split": {"optimizer": OptimizerPolicy(master=Master.SPLIT), **BF16},
    "checkpointing chunked": {
        "checkpointing": CheckpointingPolicy(True),
        "loss": LossPolicy(LossKind.CHUNKED, 5),
    },
    "lora": LORA,
    "lora bf16": {**LORA, **BF16},
    "qlora": {**LORA, "quantisation": QuantisationPolicy()},
}


AT_ONCE = replace(FAR, gradients=HOST, prefetch=2, lazy_step=False)
PLACES = {
    "lazy": FAR,
    "at once": AT_ONCE,
    "states on host, lazy": replace(FAR, gradients=Tier.DEVICE, optimizer_states=HOST),
    "states on host, at once": replace(AT_ONCE, optimizer_states=HOST),
}


@pytest.mark.usefixtures("postponed")
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("far", PLACES.values(), ids=PLACES)
def test_the_same_numbers_as_on_the_host(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, technique: str, far: PlacementPolicy
) -> None:
    engines = []
    for placement in (NEAR, far):
        policies = Policies(placement=placement, **TECHNIQUES[technique])
        dtype = torch.bfloat16 if policies.precision.parameters == "bf16" else torch.float32
        torch.manual_seed(1)
        engines.append(fit(make_model(dtype, **SIZES), policies, offload_folder=tmp_path))
    near, other = (train(engine, make_batch) for engine in engines)
    assert near == other
    assert_same_model(engines[0].model, engines[1].model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("postponed")
@pytest.mark.parametrize("states", [Tier.DEVICE, HOST])
def test_a_frozen_base_whose_adapters_are_updated_elsewhere(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, states: Tier
) -> None:
    """The base has one place on the disk; adapters are where their updates are."""
    engines = []
    with Ledger() as counted:
        for parameters in (Tier.DEVICE, NVME):
            policies = Policies(placement=PlacementPolicy(states, states, parameters), **LORA)
            torch.manual_seed(1)
            engines.append(fit(make_model(**SIZES), policies, offload_folder=tmp_path))
        frozen = [p for p in engines[1].model.parameters() if not p.requires_grad]
        places = sum(-(-p.numel() * 4 // 4096) * 4096 for p in frozen)
        assert counted.kinds(NVME) == {Kind.PARAMETERS: places}
    assert train(engines[0], make_batch) == train(engines[1], make_batch)
    assert_same_model(engines[0].model, engines[1].model)


# What is saved and loaded


def test_another_model_goes_on_from_saved_states(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path
) -> None:
    """A tied weight is read once, and what was saved stays what it was when training goes on."""
    policies = Policies(placement=FAR)
    first, second = (fit(make_model(**SIZES), policies, offload_folder=tmp_path) for _ in range(2))
    train(first, make_batch, 2)
    model, optimizer = first.model.state_dict(), first.optimizer.state_dict()
    assert model["lm_head.weight"] is model["model.embed_tokens.weight"]
    kept = {name: value.clone() for name, value in model.items()}
    expected = train(first, make_batch, 2, first=2)
    assert all(torch.equal(model[name], value) for name, value in kept.items())
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    assert train(second, make_batch, 2, first=2) == expected
    assert_same_model(first.model, second.model)


def test_what_is_not_loaded_stays(make_model: Make, tmp_path: Path) -> None:
    engine = fit(make_model(**SIZES), Policies(placement=FAR), offload_folder=tmp_path)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    engine.model.load_state_dict({name: torch.ones_like(before[name])}, strict=False)
    after = engine.model.state_dict()
    assert torch.equal(after.pop(name), torch.ones_like(before[name]))
    assert all(torch.equal(value, before[key]) for key, value in after.items())


# Where the bytes are


def test_two_places_of_what_is_trained_and_few_buffers(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path
) -> None:
    with Ledger() as counted:
        model = make_model(**SIZES)
        counted.adopt(model, HOST)
        engine = fit(model, Policies(placement=FAR), offload_folder=tmp_path)
        parameters = list(engine.model.parameters())
        places = sum(-(-p.numel() * 4 // 4096) * 4096 for p in parameters)
        assert counted.kinds(NVME)[Kind.PARAMETERS] == 2 * places
        assert Kind.PARAMETERS not in counted.kinds(HOST)
        assert Kind.PARAMETERS not in counted.kinds(Tier.DEVICE)
        # A record with two moments and a gradient, and the parameter behind it.
        update = 6 * 4 * PIECE * 4
        assert counted.kinds(HOST)[Kind.TRANSFER] == update + FETCH_BUFFERS * 4 * PIECE
        train(engine, make_batch, 2)
        counted.set_section(*counted.section)
        host = counted.total_bytes(HOST)
        train(engine, make_batch, 1)
        assert counted.total_bytes(HOST) == host
        kinds = counted.kinds(NVME)
    moved = places + kinds[Kind.GRADIENTS] + kinds[Kind.OPTIMIZER_STATES] // 2
    assert engine.optimizer.written_bytes == moved


def test_a_full_disk_is_refused_before_anything_is_written(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tightfit.engine.disk._free_bytes", lambda folder: 100 * 4096)
    writes = Faults(monkeypatch, "pwritev", -1, "")
    with pytest.raises(DoesNotFitError, match="missing") as refused:
        fit(make_model(**SIZES), Policies(placement=FAR), offload_folder=tmp_path / "new")
    assert refused.value.missing_bytes > 0
    assert writes.count == 0
    assert not (tmp_path / "new").exists()


# What fails, and who is late


@dataclass
class Kept:
    """What a step has to leave behind if it fails."""

    parameters: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]

    @classmethod
    def of(cls, engine: Engine) -> Kept:
        values = engine._stream.on_disk  # type: ignore[union-attr]
        states = engine.optimizer._disk
        assert values is not None
        assert states is not None
        parameters = list(engine.model.parameters())
        return cls(
            [values.read(p).clone() for p in parameters], [states.state(p) for p in parameters]
        )

    def assert_same(self, other: Kept) -> None:
        assert all(map(torch.equal, self.parameters, other.parameters))
        for one, two in zip(self.states, other.states, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1}
READS, WRITES = 54, 33  # of a step: 11 parameters; all but a norm are fetched in backward too


@pytest.fixture(params=[True, False], ids=["lazy", "at once"])
def make_small(
    request: pytest.FixtureRequest, make_model: Make, make_batch: MakeBatch, tmp_path: Path
) -> Callable[[], Engine]:
    """An engine after a step."""

    def make() -> Engine:
        policies = Policies(placement=replace(FAR, lazy_step=request.param))
        engine = fit(make_model(**SMALL), policies, offload_folder=tmp_path)
        train(engine, make_batch, 1)
        return engine

    return make


def test_requests_of_a_step(
    make_small: Callable[[], Engine], make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many are made to fail below, each in its turn."""
    engine = make_small()
    reads, writes = Faults(monkeypatch, "preadv", -1, ""), Faults(monkeypatch, "pwritev", -1, "")
    train(engine, make_batch, 1, first=1)
    assert (reads.count, writes.count) == (READS, WRITES)


@pytest.mark.parametrize(
    ("verb", "requests", "how"), [("preadv", READS, "EIO"), ("pwritev", WRITES, "ENOSPC")]
)
def test_a_step_that_fails_leaves_the_one_before(
    make_small: Callable[[], Engine], make_batch: MakeBatch, verb: str, requests: int, how: str
) -> None:
    """At each request: an error, parameters and states as they were, and all buffers free."""
    engine, resident = make_small(), make_small()
    kept = Kept.of(engine)
    for failing in range(requests):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, verb, failing, how)
            with pytest.raises(DiskError):
                train(engine, make_batch, 1, first=1)
        assert faults.count > failing
        give_up_step(engine)
        Kept.of(engine).assert_same(kept)
        values = engine._stream.on_disk  # type: ignore[union-attr]
        assert values is not None
        assert free_buffers(values._buffers) == FETCH_BUFFERS
        assert free_buffers(values._disk.buffers) == 6
    assert train(engine, make_batch, 2, first=1) == train(resident, make_batch, 2, first=1)
    assert_same_model(engine.model, resident.model)


def give_up_step(engine: Engine) -> None:
    """What a run leaves to its end: an engine whose updates have failed takes no more of them."""
    engine.discard_gradients()
    engine._stream.release()  # type: ignore[union-attr]
    engine.optimizer._due._due.clear()
    engine.optimizer._due._error = None


def free_buffers(buffers: Any) -> int:
    return len(buffers._free) + len(buffers._fresh)


@contextmanager
def alone(
    parameters: list[nn.Parameter], folder: Path, transfer: Transfer | None = None
) -> Iterator[DiskParameters]:
    """Values on the disk without a model."""
    slab, disk = HostSlab(CPU), DiskTier(folder)
    values = DiskParameters(parameters, transfer or Transfer(CPU), slab, disk)
    slab.allocate()
    for parameter in parameters:
        values.adopt(parameter, parameter.data)
    yield values
    disk.close()


def parameters_of(*sizes: int, trained: bool = True) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size), requires_grad=trained) for size in sizes]


@pytest.mark.parametrize("trained", [True, False])
def test_pieces_come_through_fewer_buffers(tmp_path: Path, trained: bool) -> None:
    parameters = parameters_of(20 * PIECE + 7, 5, 2 * PIECE, trained=trained)
    with alone(parameters, tmp_path, PostponedTransfer(CPU)) as values:
        places = {p: torch.zeros_like(p, requires_grad=False) for p in parameters}
        for arrival in values.send(places):
            arrival.wait()
        assert all(torch.equal(place, parameter) for parameter, place in places.items())
        assert values.read(parameters[0]) is not parameters[0]
        assert torch.equal(values.read(parameters[0]), parameters[0])


def test_nobody_has_values_before_the_disk_has_given_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (parameter,) = parameters_of(3 * PIECE)
    with alone([parameter], tmp_path) as values:
        read, gate = os.preadv, threading.Event()

        def reading(*args: Any) -> int:
            assert gate.wait(60)
            return read(*args)

        monkeypatch.setattr(os, "preadv", reading)
        place = torch.zeros_like(parameter, requires_grad=False)
        (arrival,) = values.send({parameter: place})
        waiting = threading.Thread(target=arrival.wait)
        waiting.start()
        waiting.join(0.01)
        assert waiting.is_alive()
        assert not place.any()
        gate.set()
        waiting.join(60)
        assert torch.equal(place, parameter)


def test_what_a_step_writes_is_read_at_once_and_can_be_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading waits for the writes, which here are held back until somebody reads."""
    (parameter,) = parameters_of(PIECE)
    with alone([parameter], tmp_path) as values:
        write, gate = os.pwritev, threading.Event()

        def writing(*args: Any) -> int:
            assert gate.wait(60)
            return write(*args)

        def fetched() -> torch.Tensor:
            place = torch.zeros_like(parameter, requires_grad=False)
            (arrival,) = values.send({parameter: place})
            gate.set()
            arrival.wait()
            return place

        def update(value: float) -> None:
            gate.clear()
            with values.piece(parameter, 0, PIECE) as buffer:
                buffer.fill_(value)
                kept = buffer.view(torch.uint8).clone()
            del buffer
            use = InUse(values._buffers.take())  # type: ignore[arg-type]
            use.buffer[: kept.numel()].copy_(kept)
            values.write(parameter, 0, PIECE, use)
            values._buffers.give_back(use.buffer, use.busy)
            values.let_read(parameter)

        monkeypatch.setattr(os, "pwritev", writing)
        update(2.0)
        assert torch.equal(fetched(), torch.full_like(parameter, 2.0))
        assert torch.equal(values.read(parameter), parameter)
        values.give_up()
        assert torch.equal(fetched(), parameter)
        update(3.0)
        gate.set()
        values.finish()
        values.turn([parameter])
        assert torch.equal(values.read(parameter), torch.full_like(parameter, 3.0))
        assert torch.equal(fetched(), torch.full_like(parameter, 3.0))


def test_values_that_cannot_be_loaded_leave_those_before(tmp_path: Path) -> None:
    (parameter,) = parameters_of(3 * PIECE)
    with alone([parameter], tmp_path) as values:
        for failing in range(3):
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, "pwritev", failing, "EIO")
                with pytest.raises(DiskError, match="could not be written"):
                    values.adopt(parameter, torch.zeros(3 * PIECE))
            assert torch.equal(values.read(parameter), parameter)
            assert free_buffers(values._buffers) == FETCH_BUFFERS


def test_a_dry_run_books_the_same_and_touches_no_disk(tmp_path: Path) -> None:
    sizes = (3 * PIECE, 7)
    with Ledger() as counted, alone(parameters_of(*sizes), tmp_path):
        wanted = {tier: counted.kinds(tier) for tier in (NVME, HOST)}
    with FakeTensorMode(), Ledger() as counted:  # type: ignore[no-untyped-call]
        parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
        with alone(parameters, tmp_path / "new") as values:
            assert {tier: counted.kinds(tier) for tier in (NVME, HOST)} == wanted
            assert values.send({p: torch.empty_like(p) for p in parameters}) == []
            assert values.read(parameters[0]).shape == (3 * PIECE,)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("verb", "how"), [("preadv", "EIO"), ("pwritev", "ENOSPC")])
def test_a_step_that_fails_while_the_next_forward_runs(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, verb: str, how: str
) -> None:
    """Either all of it is there or nothing is, whoever is told of the failure."""

    def make() -> Engine:
        engine = fit(make_model(**SMALL), Policies(placement=FAR), offload_folder=tmp_path)
        train(engine, make_batch, 1)
        return engine

    engine = make()
    before = Kept.of(engine)
    train(engine, make_batch, 1, first=1)
    after = Kept.of(engine)
    for failing in range(0, (READS if verb == "preadv" else WRITES) + 11, 3):
        engine = make()
        failed = False
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, verb, failing, how)
            try:
                engine.backward(engine.loss(*make_batch(1), 30))
                engine.step()
                engine.loss(*make_batch(2), 30)
            except DiskError:
                failed = True
            for _ in engine.optimizer._own:  # each unit tells once
                try:
                    engine.drain()
                except DiskError:
                    failed = True
        found = Kept.of(engine)
        updated = torch.equal(found.states[0]["exp_avg"], after.states[0]["exp_avg"])
        assert failed or updated
        found.assert_same(after if updated else before)
