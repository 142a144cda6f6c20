"""States on the disk against resident ones, bit for bit, and what a failing disk leaves behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.on_disk import (
    CPU,
    OnDisk,
    Resident,
    assert_same,
    make_parameters,
    small_pieces,
)
from tests.engine.postponed import PostponedTransfer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.bill.table import Kind, Phase
from tightfit.engine.disk import DiskError
from tightfit.errors import DoesNotFitError
from tightfit.ledger import Ledger
from tightfit.policies import Master, OptimizerName, OptimizerPolicy, Tier

__all__ = ["small_pieces"]
pytestmark = pytest.mark.usefixtures("small_pieces")

RULES = (
    OptimizerName.ADAMW,
    OptimizerName.SGD,
    OptimizerName.LION,
    OptimizerName.ADAMW_8BIT,
    OptimizerName.ADAMW_COMPACT,
)


@contextmanager
def on_disk(*args: object, **options: object) -> Iterator[OnDisk]:
    run = OnDisk(*args, **options)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("disk_gradients", [True, False], ids=["gradients too", "states"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "inline"])
def test_the_same_numbers(
    name: OptimizerName, dtype: torch.dtype, disk_gradients: bool, lazy: bool, tmp_path: Path
) -> None:
    """20 steps, in some of which some parameters have no gradient, with copies that come late."""
    policy = OptimizerPolicy(name)
    resident = Resident(policy, make_parameters(dtype))
    with on_disk(
        policy,
        make_parameters(dtype),
        tmp_path,
        transfer=PostponedTransfer(CPU),
        disk_gradients=disk_gradients,
        lazy=lazy,
    ) as run:
        for step in range(20):
            skipped = (2, 5) if step % 3 == 1 else ()
            resident.step(step, skipped)
            run.step(step, skipped)
        assert_same(run, resident)


@pytest.mark.parametrize(
    ("dtype", "split"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "split bf16"],
)
def test_parameters_on_the_host_are_updated_there(
    dtype: torch.dtype, split: bool, tmp_path: Path
) -> None:
    policy = OptimizerPolicy(master=Master.SPLIT if split else Master.FP32)
    resident = Resident(policy, make_parameters(dtype))
    transfer = PostponedTransfer(CPU)
    with on_disk(
        policy, make_parameters(dtype), tmp_path, transfer=transfer, publishes=False, lazy=True
    ) as run:
        for step in range(5):
            resident.step(step)
            run.step(step)
        assert_same(run, resident)


def test_forward_has_to_wait_for_copies(tmp_path: Path) -> None:
    """The proof that the late copies above would show: without waiting, NaN."""
    parameters = make_parameters(torch.float32, ((300,), (300,)))
    with on_disk(OptimizerPolicy(), parameters, tmp_path, transfer=PostponedTransfer(CPU)) as run:
        run.begin(0)
        run.states.finish()
        assert all(bool(parameter.isnan().all()) for parameter in parameters)
        run.finish()
        assert not any(bool(parameter.isnan().any()) for parameter in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RULES)
def test_states_are_saved_and_loaded(
    name: OptimizerName, dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = OptimizerPolicy(name)
    resident = Resident(policy, make_parameters(dtype))
    with on_disk(policy, make_parameters(dtype), tmp_path) as first:
        for step in range(2):
            resident.step(step)
            first.step(step)
        saved = [first.states.state(parameter) for parameter in first.parameters]
        parameters = make_parameters(dtype)
        with on_disk(policy, parameters, tmp_path) as second:
            for old, new, states in zip(first.parameters, parameters, saved, strict=True):
                new.data.copy_(old)
                second.states.load(new, states)
            for step in range(2, 4):
                resident.step(step)
                second.step(step)
            assert_same(second, resident)


def test_loading_some_states_keeps_the_others(tmp_path: Path) -> None:
    parameters = make_parameters(torch.bfloat16)
    with on_disk(OptimizerPolicy(), parameters, tmp_path) as run:
        run.step(0)
        for parameter in parameters:
            before = run.states.state(parameter)
            run.states.load(parameter, {"master": torch.full_like(parameter, 3)})
            after = run.states.state(parameter)
            assert torch.equal(after.pop("master"), torch.full(parameter.shape, 3.0))
            assert all(torch.equal(after[name], before[name]) for name in after)


def test_states_look_as_they_do_in_memory(tmp_path: Path) -> None:
    parameters = make_parameters(torch.bfloat16, ((64, 64), (7,)))
    with on_disk(OptimizerPolicy(OptimizerName.ADAMW_8BIT), parameters, tmp_path) as run:
        matrix, vector = (
            {n: (t.dtype, t.shape) for n, t in run.states.state(p).items()} for p in parameters
        )
        assert list(matrix)[:2] == ["master", "step"]
        assert matrix["master"] == (torch.float32, (64, 64))
        assert matrix["exp_avg"] == (torch.uint8, (64, 64))
        assert matrix["exp_avg_scales"] == (torch.float32, (16,))
        assert matrix["step"] == (torch.float32, ())
        assert vector["exp_avg"] == (torch.float32, (7,))
        assert run.states.entries(parameters[0]) == matrix


class Faults:
    """Makes one of the disk's requests fail, counted from when this was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verb: str, failing: int, how: str) -> None:
        self._plain: Callable[..., int] = getattr(os, verb)
        self._lock = threading.Lock()
        self._failing = failing
        self._how = how
        self.count = 0
        monkeypatch.setattr(os, verb, self._request)

    def _request(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            mine, self.count = self.count, self.count + 1
        if mine != self._failing:
            return self._plain(descriptor, buffers, offset)
        if self._how == "ends":
            return 0
        if self._how == "short":
            return self._plain(descriptor, [buffers[0][:4096]], offset)
        raise OSError(getattr(errno, self._how), os.strerror(getattr(errno, self._how)))


FAULT_SHAPES = ((15, 3), (8193,), (2, 8451), (64, 64), (5,))
REQUESTS = 8  # of a step with these shapes: pieces


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "inline"])
@pytest.mark.parametrize(
    ("verb", "how", "message"),
    [
        ("preadv", "EIO", "could not be read"),
        ("preadv", "ends", "where it was to be read"),
        ("pwritev", "EIO", "could not be written"),
        ("pwritev", "ENOSPC", "No space left"),
        ("pwritev", "ends", "where it was to be written"),
    ],
)
def test_a_failing_disk_leaves_the_step_before(
    verb: str, how: str, message: str, lazy: bool, tmp_path: Path
) -> None:
    """At each request of a step: the error, the states as they were, and a step that works."""
    policy = OptimizerPolicy()
    dtype = torch.bfloat16
    for failing in range(REQUESTS):
        resident = Resident(policy, make_parameters(dtype, FAULT_SHAPES))
        with on_disk(
            policy,
            make_parameters(dtype, FAULT_SHAPES),
            tmp_path,
            disk_gradients=False,
            lazy=lazy,
        ) as run:
            resident.step(0)
            run.step(0)
            parameters = [parameter.detach().clone() for parameter in run.parameters]
            with pytest.MonkeyPatch.context() as patch:
                faults = Faults(patch, verb, failing, how)
                with pytest.raises(DiskError, match=message):
                    run.step(1)
            assert faults.count > failing
            assert run.free_buffers == 6
            run.due.close()
            for parameter, before in zip(run.parameters, parameters, strict=True):
                parameter.data.copy_(before)  # as a checkpoint would
            assert_same(run, resident)
            resident.step(1)
            run.due = type(run.due)(lazy=lazy)
            run.arrivals.clear()
            run.step(1)
            assert_same(run, resident)


def test_every_request_of_a_step_was_made_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parameters = make_parameters(torch.bfloat16, FAULT_SHAPES)
    with on_disk(OptimizerPolicy(), parameters, tmp_path, disk_gradients=False) as run:
        reads = Faults(monkeypatch, "preadv", -1, "")
        writes = Faults(monkeypatch, "pwritev", -1, "")
        run.step(0)
        assert reads.count == writes.count == REQUESTS


@pytest.mark.parametrize("verb", ["preadv", "pwritev"])
def test_requests_that_are_cut_short_go_on(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resident = Resident(OptimizerPolicy(), make_parameters(torch.float32))
    with on_disk(OptimizerPolicy(), make_parameters(torch.float32), tmp_path) as run:
        for step in range(3):
            resident.step(step)
            Faults(monkeypatch, verb, 4, "short")
            run.step(step)
        assert_same(run, resident)


def test_states_that_cannot_be_read_or_loaded_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parameters = make_parameters(torch.float32, ((2, 8451),))
    with on_disk(OptimizerPolicy(), parameters, tmp_path) as run:
        run.step(0)
        before = run.states.state(parameters[0])
        for verb in ("preadv", "pwritev"):
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, verb, 1, "EIO")
                with pytest.raises(DiskError):
                    run.states.load(parameters[0], {"master": torch.zeros(2, 8451)})
            if verb == "preadv":
                with pytest.MonkeyPatch.context() as patch:
                    Faults(patch, verb, 1, "EIO")
                    with pytest.raises(DiskError):
                        run.states.state(parameters[0])
            after = run.states.state(parameters[0])
            assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("failing", range(REQUESTS))
def test_an_update_that_fails_gives_the_buffers_back(
    failing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever fails, here arithmetic, the tier can be used again at once."""
    resident = Resident(OptimizerPolicy(), make_parameters(torch.float32, FAULT_SHAPES))
    parameters = make_parameters(torch.float32, FAULT_SHAPES)
    with on_disk(OptimizerPolicy(), parameters, tmp_path, disk_gradients=False) as run:
        update, calls = run.rule.update, iter(range(failing + 1))

        def failing_update(*args: Any) -> None:
            if next(calls) == failing:
                raise ArithmeticError("here")
            update(*args)

        with monkeypatch.context() as patch:
            patch.setattr(run.rule, "update", failing_update)
            with pytest.raises(ArithmeticError, match="here"):
                run.begin(0)
        assert run.free_buffers == 6
        for parameter, start in zip(parameters, resident.parameters, strict=True):
            parameter.data.copy_(start)
        assert_same(run, resident)
        resident.step(0)
        run.step(0)
        assert_same(run, resident)


def test_a_disk_without_room_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = 1000 * 4096
    monkeypatch.setattr("tightfit.engine.disk._free_bytes", lambda folder: free)
    parameters = make_parameters(torch.float32, ((1000, 100),))  # 293 blocks and no more in a slot
    with on_disk(OptimizerPolicy(), parameters, tmp_path / "on", disk_gradients=False):
        pass
    free = 500 * 4096
    writes = Faults(monkeypatch, "pwritev", -1, "")
    with pytest.raises(DoesNotFitError, match="missing") as refused:
        OnDisk(OptimizerPolicy(), parameters, tmp_path / "off", disk_gradients=False)
    assert refused.value.missing_bytes > 0
    assert writes.count == 0
    assert not (tmp_path / "off").exists()


def test_a_slow_disk_delays_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No write ends before everything that can be read without it was read."""
    resident = Resident(OptimizerPolicy(), make_parameters(torch.float32))
    with on_disk(
        OptimizerPolicy(), make_parameters(torch.float32), tmp_path, disk_gradients=False
    ) as run:
        resident.step(0)
        read, write, reads, enough = os.preadv, os.pwritev, [], threading.Event()

        def reading(*args: object) -> int:
            reads.append(args)
            if len(reads) == 6:
                enough.set()
            return read(*args)  # type: ignore[arg-type]

        def writing(*args: object) -> int:
            assert enough.wait(60)
            return write(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", reading)
        monkeypatch.setattr(os, "pwritev", writing)
        run.step(0)
        assert_same(run, resident)


def test_memory_is_bounded_and_the_disk_is_booked(tmp_path: Path) -> None:
    """Six buffers of the largest piece and the counters, whatever the states take on the disk."""
    parameters = make_parameters(torch.float32, ((40, 8192), (7,)))
    values = 40 * 8192
    with Ledger() as counted, on_disk(OptimizerPolicy(), parameters, tmp_path) as run:
        run.step(0)
        assert counted.kinds(Tier.NVME) == {
            Kind.MASTER_WEIGHTS: 2 * 4 * (values + 7),
            # A record of 7 values is a block, of which 28 bytes are the master's.
            Kind.OPTIMIZER_STATES: 2 * (8 * values + 4096 - 28),
            Kind.GRADIENTS: 4 * values + 4096,
        }
        assert counted.kinds(Tier.HOST) == {
            Kind.TRANSFER: 6 * 16 * 8192,
            Kind.OPTIMIZER_STATES: 2 * 4,
        }
        counted.set_section(*counted.section)
        before = counted.peak_bytes(Tier.HOST)
        written_bytes = run.disk.written_bytes
        run.step(1)
        assert counted.peak_bytes(Tier.HOST) == before
    assert run.disk.written_bytes - written_bytes == 16 * values + 2 * 4096


def test_a_dry_run_books_what_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes on every tier, with fake tensors and without a disk."""
    shapes = ((3, 8192), (64, 64), (7,))
    policy = OptimizerPolicy(OptimizerName.ADAMW_8BIT)
    with Ledger() as counted:
        parameters = make_parameters(torch.bfloat16, shapes)
        with on_disk(policy, parameters, tmp_path) as run:
            run.step(0)
            wanted = {tier: counted.kinds(tier) for tier in (Tier.NVME, Tier.HOST)}
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "pwritev")
    monkeypatch.setattr("tests.engine.on_disk.gradients_of", fake_gradients)
    monkeypatch.setattr("tests.engine.on_disk.clip_of", lambda step: None)
    with FakeTensorMode(), Ledger() as counted:  # type: ignore[no-untyped-call]
        parameters = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes]
        with on_disk(policy, parameters, tmp_path / "new") as run:
            run.step(0)
            assert {tier: counted.kinds(tier) for tier in wanted} == wanted
            states = run.states.state(parameters[0])
            assert states["exp_avg"].shape == (3, 8192)
            run.states.load(parameters[0], states)
    assert not (tmp_path / "new").exists()


def fake_gradients(step: int, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.empty_like(parameter) for parameter in parameters]


def test_an_update_allocates_nothing(tmp_path: Path) -> None:
    """But scalars: no ledger sees the thread that updates."""
    parameters = make_parameters(torch.bfloat16, ((10, 8192),))
    with (
        Ledger() as counted,
        on_disk(OptimizerPolicy(), parameters, tmp_path, disk_gradients=False) as run,
    ):
        run.step(0)
        run._update = lambda unit: None  # type: ignore[method-assign]
        run.begin(1)
        before = {tier: counted.total_bytes(tier) for tier in Tier}
        counted.set_section(Phase.STEP, "update")
        for unit in list(run.states._due):
            run.arrivals += run.states.update(unit)
        peaks = counted.sections()[Phase.STEP, "update"]
        for tier in Tier:
            assert sum(peaks[tier].values()) - before[tier] <= 64
        run.finish()


def test_a_step_needs_all_its_updates(tmp_path: Path) -> None:
    with on_disk(OptimizerPolicy(), make_parameters(torch.float32), tmp_path) as run:
        run._update = lambda unit: None  # type: ignore[method-assign]
        run.begin(0)
        with pytest.raises(AssertionError, match="not asked for"):
            run.states.finish()


def test_a_step_that_fails_elsewhere_is_given_up(tmp_path: Path) -> None:
    """Begun and not updated, as when another tier's update fails: then the next one."""
    resident = Resident(OptimizerPolicy(), make_parameters(torch.float32))
    with on_disk(OptimizerPolicy(), make_parameters(torch.float32), tmp_path) as run:
        update = run._update
        run._update = lambda unit: None  # type: ignore[method-assign]
        run.begin(0)
        run.states.give_up()
        run.states.finish()
        assert run.free_buffers == 6
        run._update = update  # type: ignore[method-assign]
        resident.step(0)
        run.step(0)
        assert_same(run, resident)


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    with on_disk(OptimizerPolicy(), make_parameters(torch.float32), tmp_path) as run:
        run.step(0)
        assert list(tmp_path.iterdir()) == []
