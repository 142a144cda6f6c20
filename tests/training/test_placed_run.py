"""Whole runs whose states are off the device: what they save, resume, and say when a disk fails."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.taken import only

from tightfit.bill.table import Kind
from tightfit.engine import activations
from tightfit.errors import DoesNotFitError, TrainingError
from tightfit.facts.job import Job
from tightfit.policies import Tier
from tightfit.training.checkpoint_folders import latest_checkpoint
from tightfit.training.run import make_plan, prepare

MakeJob = Callable[..., Job]
RunJob = Callable[..., Any]
Keys = dict[str, Any]

PLACES: dict[str, Keys] = {
    "device": {},
    "host": {"offload_optimizer": "cpu", "offload_param": "cpu", "offload_activations": "true"},
    "disk": {"offload_optimizer": "nvme", "offload_param": "cpu", "lazy_step": "true"},
    "all on disk": {"offload_optimizer": "nvme", "offload_param": "nvme", "lazy_step": "true"},
    "parameters on disk": {"offload_optimizer": "cpu", "offload_param": "nvme"},
}
PAIRS = [
    ("disk", "disk"), ("host", "all on disk"), ("all on disk", "device"), ("device", "host"),
    ("device", "parameters on disk"), ("parameters on disk", "host"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_activations_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_LEAVING_BYTES", 1)


def saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in ("model.safetensors", "adapter_model.safetensors", "optimizer.safetensors"):
        if (checkpoint / name).exists():
            found |= {f"{name}:{key}": t for key, t in load_file(checkpoint / name).items()}
    return found


@pytest.mark.parametrize("place", [place for place in PLACES if place != "device"])
def test_a_placed_run_saves_what_a_resident_one_does(
    run_job: RunJob, place: str, tmp_path: Path
) -> None:
    resident = run_job(offload_param="none", offload_activations="false")
    placed = run_job(**PLACES[place], output_dir=str(tmp_path / "placed"))
    assert placed.losses == resident.losses
    found, expected = saved(placed.result.checkpoint), saved(resident.result.checkpoint)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_where_its_states_are_placed_elsewhere(
    run_job: RunJob, before: str, after: str, tmp_path: Path
) -> None:
    steady = {"lr_scheduler_type": "constant"}  # a longer run would have another schedule
    whole = run_job(**steady, output_dir=str(tmp_path / "whole"), max_steps=6)
    first = run_job(**steady, **PLACES[before], max_steps=3)
    assert (first.prepared.output_dir / "plan.yaml").exists()  # but something else is asked for
    rest = run_job(**steady, **PLACES[after], max_steps=6, resume=True)
    assert first.losses + rest.losses == whole.losses
    found, expected = saved(rest.result.checkpoint), saved(whole.result.checkpoint)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_disk_has_what_the_bill_says_and_nothing_is_left_of_it(run_job: RunJob) -> None:
    run = run_job(**PLACES["disk"])
    bill, measured = run.plan.bill, run.result.measured
    for kind in (Kind.OPTIMIZER_STATES, Kind.MASTER_WEIGHTS):
        assert bill.kinds_at_peak(Tier.NVME).get(kind) == measured.kinds_at_peak(Tier.NVME).get(
            kind
        )
    assert bill.peak_bytes(Tier.NVME) >= measured.peak_bytes(Tier.NVME) > 0
    assert all(record.nvme_written_bytes > 0 for record in run.result.records[1:])
    assert not [path for path in run.prepared.job.disk_folder.rglob("*") if path.is_file()]


def test_a_disk_without_room_is_told_before_anything_is_trained(
    job: MakeJob, no_measuring: None, plain: Keys
) -> None:
    prepared = prepare(job(**{**plain, **PLACES["disk"]}, nvme_limit="1KiB"))
    with pytest.raises(DoesNotFitError, match="nvme"):
        make_plan(prepared)
    assert not prepared.output_dir.exists()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_in_the_middle_leaves_the_checkpoint_before(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """The first calls belong to making the states and to steps; a later one fails for good."""
    plain_call = getattr(os, call)
    calls: list[int] = []

    def fail_later(*arguments: Any) -> int:
        calls.append(1)
        if (first.checkpoint_exists()) and len(calls) > 3:
            raise OSError(error, os.strerror(error))
        return plain_call(*arguments)  # type: ignore[no-any-return]

    class First:
        folder: Path | None = None

        def checkpoint_exists(self) -> bool:
            return self.folder is not None and latest_checkpoint(self.folder) is not None

    first = First()
    done = run_job(**PLACES["disk"], max_steps=2)
    first.folder = done.prepared.output_dir
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail_later)
        with pytest.raises(TrainingError, match=r"offload.*"):
            run_job(**PLACES["disk"], max_steps=6, resume=True)
    assert latest_checkpoint(done.prepared.output_dir) == done.result.checkpoint
    rest = run_job(**PLACES["disk"], max_steps=3, resume=True)
    assert [record.step for record in rest.result.records] == [3]


KILLED_MIDWAY = """
import os, signal, sys
from tightfit.cli.main import main
writes = []
plain = os.pwritev
def write(*arguments):
    writes.append(1)
    if len(writes) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)
os.pwritev = write
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("writes", only([75], [75, 130]))
def test_a_kill_in_the_middle_of_a_step_leaves_the_checkpoint_and_no_files(
    job: MakeJob, run_job: RunJob, writes: int, tmp_path: Path, plain: Keys
) -> None:
    steady = {"lr_scheduler_type": "constant"}
    keys = {**plain, **PLACES["disk"], **steady, "save_strategy": "steps", "save_steps": 1}
    made = job(**keys, max_steps=40)
    flags = [
        f"--{key}={value}"
        for key, value in json.loads(made.model_dump_json(exclude_unset=True)).items()
    ]
    command = [sys.executable, "-c", KILLED_MIDWAY, str(writes), "train", *flags]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    folder = Path(made.output_dir or "")
    assert not [path for path in made.disk_folder.rglob("*") if path.is_file()]
    before = latest_checkpoint(folder)
    assert before is not None
    step = int(before.name.rpartition("-")[2])
    rest = run_job(**PLACES["disk"], **steady, max_steps=step + 1, resume=True)
    whole = run_job(**steady, max_steps=step + 1, output_dir=str(tmp_path / "whole"))
    assert rest.losses == whole.losses[step:]
