"""A stage of a pipeline fails while others wait for what it sends, or all are interrupted there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.faults.driver import Fault, losses, run
from tests.faults.test_faults import KILLED, MEMORY, ODD, SLOW, check_end, check_same_files

from tightfit.training.checkpoint_folders import latest_checkpoint

SHARED = {
    "stages": {"ranks": 2, "pipeline_parallel": 2},
    "stages of ZeRO-3": {"ranks": 4, "pipeline_parallel": 2, "zero_stage": 3},
}
FAULTS = [
    pytest.param("stages", Fault("backward", "memory", after=3), MEMORY, marks=SLOW),
    pytest.param("stages", Fault("forward", "odd", rank=0, after=3), ODD, marks=SLOW),
    pytest.param("stages", Fault("backward", "odd", rank=0, after=3), ODD, marks=SLOW),
    pytest.param("stages", Fault("forward", "memory", after=3), MEMORY, marks=SLOW),
    pytest.param("stages", Fault("backward", rank=0, after=3), KILLED, marks=SLOW),
    pytest.param("stages of ZeRO-3", Fault("backward", "odd", rank=2, after=3), ODD, marks=SLOW),
    pytest.param("stages of ZeRO-3", Fault("forward", rank=0, after=3), KILLED, marks=SLOW),
]


def staged(job: dict[str, Any], folder: Path, shared: str) -> dict[str, Any]:
    """The job, whose ranks are stages, or share them out as well."""
    sharding = SHARED[shared]
    micro_batches = 4 * 2 // sharding["ranks"]
    policies = {
        "batch": {"micro_batch_size": 1, "accumulation_steps": micro_batches},
        "precision": {"parameters": "fp32"},
        "sharding": sharding,
    }
    plan = folder / "stages.yaml"
    plan.write_text(yaml.safe_dump({"policies": policies}))
    keys = {"num_gpus": sharding["ranks"], "pipeline_parallel_size": 2, "plan": str(plan)}
    return job | keys | {"output_dir": str(folder / "run")}


@pytest.mark.parametrize(("shared", "fault", "said"), FAULTS)
def test_a_stage_that_fails_ends_all(
    job: dict[str, Any], undisturbed: Path, tmp_path: Path, shared: str, fault: Fault, said: str
) -> None:
    check_end(run(tmp_path, staged(job, tmp_path, shared), fault=fault), fault, said)
    last = latest_checkpoint(tmp_path / "run")
    assert last == tmp_path / "run" / "checkpoint-2"
    # Stages see the same data, so they draw the same random numbers; other ranks do not.
    check_same_files(last, undisturbed / "checkpoint-2", but="random_state.")


@SLOW
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_interrupted_step_is_finished_and_saved(
    job: dict[str, Any], undisturbed: Path, tmp_path: Path, place: str
) -> None:
    mine = staged(job, tmp_path, "stages")
    ended = run(tmp_path, mine, fault=Fault(place, "interrupt", rank=0, after=2))
    assert (ended.code, ended.left_behind) == (130, []), ended.err
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-3"
    ended = run(tmp_path, mine, "--resume")
    assert (ended.code, ended.err, ended.left_behind) == (0, "", [])
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), rel=1e-5)
