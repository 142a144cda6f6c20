"""One rank of two fails, anywhere: the command ends with one message, what was saved is whole, and
the run goes on from there as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.faults.conftest import STEPS
from tests.faults.driver import Ended, Fault, losses, named, run

from tightfit.training.checkpoint_folders import latest_checkpoint

KILLED = "was killed by SIGKILL"
MEMORY = "out of memory although the bill fitted: no memory left for this test"
FULL = "could not be written ("
ODD = "ValueError: something odd"
LAST = "from {run}/checkpoint-2"
SLOW = pytest.mark.slow
# With what is said, and the step of the last checkpoint that is whole, 0 for none.
RESUMED = [
    pytest.param(Fault("backward", after=3), KILLED, 2),
    pytest.param(Fault("writing", "disk", after=4), FULL, 2, marks=SLOW),
    pytest.param(Fault("forward", after=3), KILLED, 2, marks=SLOW),
    pytest.param(Fault("step"), KILLED, 2, marks=SLOW),
    pytest.param(Fault("evaluation", rank=0, after=4), KILLED, 4, marks=SLOW),
    pytest.param(Fault("writing", after=4), KILLED, 2, marks=SLOW),
    pytest.param(Fault("writing", rank=0, after=4), KILLED, 2, marks=SLOW),
    pytest.param(Fault("layout", rank=0, after=4), KILLED, 2, marks=SLOW),
    pytest.param(Fault("renaming", rank=0, after=4), KILLED, 2, marks=SLOW),
    pytest.param(Fault("flushing", "disk", rank=0, after=4), FULL, 2, marks=SLOW),
    pytest.param(Fault("renaming", "disk", rank=0, after=4), FULL, 2, marks=SLOW),
    pytest.param(Fault("layout", "disk", rank=0, after=4), FULL, 2, marks=SLOW),
    pytest.param(Fault("opening", "disk", after=4), FULL, 2, marks=SLOW),
    pytest.param(Fault("writing", "disk", rank=0, after=4), FULL, 2, marks=SLOW),
    pytest.param(Fault("writing", "odd", after=4), ODD, 2, marks=SLOW),
    pytest.param(Fault("forward", "memory", after=3), MEMORY, 2, marks=SLOW),
    pytest.param(Fault("backward", "memory", rank=0, after=3), MEMORY, 2, marks=SLOW),
    pytest.param(Fault("data", "odd", after=3), ODD, 2, marks=SLOW),
    pytest.param(Fault("evaluation", "odd", after=4), ODD, 4, marks=SLOW),
    pytest.param(Fault("answer", "odd", after=4), ODD, 4, marks=SLOW),
]
RESTARTED = [
    # `tests/launch/test_supervisor.py` starts all again after a kill every day.
    pytest.param(Fault("writing", after=4), KILLED, LAST, marks=SLOW),
    pytest.param(Fault("forward", "memory", after=3), MEMORY, LAST, marks=SLOW),
    pytest.param(Fault("writing", after=2), KILLED, "from the start", marks=SLOW),
    pytest.param(Fault("evaluation", after=0), KILLED, "from the start", marks=SLOW),
    pytest.param(Fault("loading", after=0), KILLED, "from the start", marks=SLOW),
    pytest.param(Fault("loading", rank=0, after=0), KILLED, "from the start", marks=SLOW),
    pytest.param(Fault("step", rank=0), KILLED, LAST, marks=SLOW),
]


@pytest.mark.parametrize(("fault", "said", "saved"), RESUMED)
def test_a_rank_that_fails_ends_all_and_the_run_can_go_on(
    job: dict[str, Any], undisturbed: Path, tmp_path: Path, fault: Fault, said: str, saved: int
) -> None:
    output_dir = tmp_path / "run"
    words = ["--output_dir", str(output_dir)]
    check_end(run(tmp_path, job, *words, fault=fault), fault, said)
    check_saved(output_dir, undisturbed, saved)
    ended = run(tmp_path, job, *words, "--resume")
    assert (ended.code, ended.err, ended.left_behind) == (0, "", [])
    if saved < STEPS:
        check_same_run(output_dir, undisturbed)


@pytest.mark.parametrize(("fault", "said", "begins"), RESTARTED)
def test_with_restarts_it_goes_on_by_itself(
    job: dict[str, Any], undisturbed: Path, tmp_path: Path, fault: Fault, said: str, begins: str
) -> None:
    output_dir = tmp_path / "run"
    words = ["--output_dir", str(output_dir), "--max_restarts", "1"]
    ended = run(tmp_path, job, *words, fault=fault)
    assert (ended.code, ended.errors, ended.left_behind) == (0, [], [])
    assert ended.err.startswith(named(fault).removeprefix("error: "))
    assert said in ended.err
    begins = begins.format(run=output_dir)
    assert f"all ranks start again {begins}" in ended.err
    assert ended.err.endswith("; restart 1 of 1\n")
    check_same_run(output_dir, undisturbed)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_the_stated_timeout(
    job: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    """Nobody can see that it hangs but in a collective, which gives up after `ddp_timeout`."""
    output_dir, timeout = tmp_path / "run", 25
    words = ["--output_dir", str(output_dir), "--ddp_timeout", str(timeout)]
    ended = run(tmp_path, job, *words, fault=Fault("backward", "stop", after=3))
    assert (ended.code, len(ended.errors), ended.left_behind) == (1, 1, [])
    assert ended.err.startswith("error: rank 0 (")
    assert "still running and silent: rank 1" in ended.err
    assert ended.seconds is not None
    assert timeout - 1 <= ended.seconds < timeout + 20
    check_saved(output_dir, undisturbed, 2)


def check_end(ended: Ended, fault: Fault, said: str) -> None:
    """One message with the rank and the reason; all was over within seconds."""
    assert ended.code == 1
    (message,) = ended.errors
    assert message.startswith(named(fault))
    assert said in ended.err
    assert ended.seconds is not None
    assert ended.seconds < 30
    assert ended.left_behind == []


def check_saved(output_dir: Path, undisturbed: Path, step: int) -> None:
    """The last checkpoint is that of `step`, and whole."""
    last = latest_checkpoint(output_dir)
    assert last == output_dir / f"checkpoint-{step}"
    check_same_files(last, undisturbed / last.name)


def check_same_run(output_dir: Path, undisturbed: Path) -> None:
    """Losses, and what was saved at the end; nothing half-written is left."""
    assert losses(output_dir) == pytest.approx(losses(undisturbed), rel=1e-6)
    check_same_files(output_dir / f"checkpoint-{STEPS}", undisturbed / f"checkpoint-{STEPS}")
    assert list(output_dir.glob(".checkpoint-*")) == []


def check_same_files(mine: Path, other: Path, but: str | None = None) -> None:
    """Checkpoints of the same files, with the same tensors, but for names that begin so."""
    assert {path.name for path in mine.iterdir()} == {path.name for path in other.iterdir()}
    for path in mine.glob("*.safetensors"):
        own, its = load_file(path), load_file(other / path.name)
        if but is not None:
            own, its = (
                {n: t for n, t in each.items() if not n.startswith(but)} for each in (own, its)
            )
        assert own.keys() == its.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, its[name], rtol=1e-5, atol=1e-7)
