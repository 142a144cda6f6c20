"""Two ranks on cards over NCCL, and the same on gloo (slow): so the file runs where no card is.

The runs are those of `tests/engine/sharded_runs.py` and of `tests/faults`. Replicas of shards need
four ranks: `tests/engine` has them on gloo.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine import sharded_runs as runs
from tests.engine.compared_runs import check_parameters
from tests.engine.compared_runs import losses as losses_of_all
from tests.engine.compared_runs import read as read_run
from tests.faults.conftest import STEPS
from tests.faults.conftest import job as job  # a fixture
from tests.faults.driver import Fault, losses, run

from tightfit.monitor.communication import CommunicationWatch

CARDS = torch.cuda.device_count()
TWO = pytest.mark.skipif(CARDS < runs.RANKS_OF_CARDS, reason="needs 2 CUDA devices and NCCL")
ONE = pytest.mark.skipif(CARDS < 1, reason="needs a CUDA device and NCCL")
KINDS = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=TWO)]
CASES = runs.CARDS[runs.RANKS_OF_CARDS]
# Relative of losses and norms, absolute of parameters: sums in another order, on cards by kernels
# that are chosen by shape; 16 bits are rounded before sums.
NUMBERS = {"fp32": 1e-5, "bf16": 2e-2}
PARAMETERS = {"fp32": 5e-5, "bf16": 2e-2}
BILL_MAY_BE_HIGH = 0.03


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of devices."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have left their results."""
    folder = tmp_path_factory.mktemp(f"on {kind}")
    cases, steps = json.dumps(runs.CARDS), str(runs.STEPS)
    program = [sys.executable, str(runs.PROGRAM), str(folder), cases, steps, kind]
    done = subprocess.run(program, env=environment(kind), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def environment(kind: str) -> dict[str, str]:
    """Cards are hidden from what is to run without."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {}
    return {**os.environ, **own, **hidden}


def read(folder: Path, case: str, who: str) -> tuple[Any, dict[str, torch.Tensor]]:
    return read_run(folder, case, runs.RANKS_OF_CARDS, who)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_does(folder: Path, case: str) -> None:
    precision = "bf16" if "bf16" in case.split() else "fp32"
    alone, expected = read(folder, case, "alone")
    found_losses = losses_of_all(folder, case, runs.RANKS_OF_CARDS)
    assert found_losses == pytest.approx(alone["losses"], rel=NUMBERS[precision])
    for rank in range(runs.RANKS_OF_CARDS):
        found, parameters = read(folder, case, str(rank))
        assert found["norms"] == pytest.approx(alone["norms"], rel=NUMBERS[precision])
        check_parameters(parameters, expected, PARAMETERS[precision])


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_bill(folder: Path, kind: str, case: str) -> None:
    """To the byte on gloo. Cards have kernels of their own: 3% high at most there, never low."""
    for rank, who in runs.fake_names(case, runs.RANKS_OF_CARDS).items():
        fake, _ = read(folder, case, who)
        real, _ = read(folder, case, str(rank))
        billed = peaks(fake["tables"][str(runs.FAKE_STEPS - 1)])
        for step in runs.later_steps():
            for phase, measured in peaks(real["tables"][step]).items():
                high = (billed[phase] - measured) / measured
                assert 0 <= high <= (0 if kind == "cpu" else BILL_MAY_BE_HIGH), (who, phase)


def peaks(table: dict[str, dict[str, dict[str, int]]]) -> dict[str, int]:
    """Bytes on the device by phase."""
    phases = ("forward", "backward", "step")
    return {phase: sum(table[phase]["device"].values()) for phase in phases}


def test_a_rank_that_is_killed_ends_the_other_and_waits_were_counted(
    job: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(kind).items():
        monkeypatch.setenv(name, value)
    output_dir = tmp_path / "run"
    words = ["--output_dir", str(output_dir)]
    ended = run(tmp_path, job, *words, fault=Fault("backward", after=3))
    assert ended.code == 1
    assert "was killed by SIGKILL" in ended.err
    assert ended.seconds is not None
    assert ended.seconds < 30
    assert ended.left_behind == []
    ended = run(tmp_path, job, *words, "--resume")
    assert (ended.code, ended.left_behind) == (0, [])
    assert sorted(losses(output_dir)) == list(range(1, STEPS + 1))
    lines = (output_dir / "trainer_log.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["event"] == "step"]
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert sum(step["communication_seconds"] for step in steps) > 0


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process and its card, set up before anything is sent."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@ONE
@pytest.mark.usefixtures("one_rank")
def test_the_stream_of_the_step_that_waits_for_another_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events of real streams: what was sent from another stream takes some 0.1 s there."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    device = torch.device("cuda", torch.cuda.current_device())
    watch, other = CommunicationWatch(device), torch.cuda.Stream()
    values = torch.ones(8, device=device)
    dist.all_reduce(values)  # kernels are loaded, which may take longer than the card sleeps
    torch.cuda.synchronize()
    with watch.counting():
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(200_000_000)  # cycles
            dist.all_reduce(values)
            sent = other.record_event()
        torch.cuda.current_stream().wait_event(sent)
        values.add_(1)
    torch.cuda.synchronize()
    assert watch.take_seconds() > 0.01
    assert watch.take_seconds() == 0
