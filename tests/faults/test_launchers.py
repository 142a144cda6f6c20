"""Ranks that others have started: torchrun, which starts them again after a failure, and srun.

srun is not here: its variables are set by hand, for ranks that really train.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.faults.driver import HANGS_SECONDS, HOOK, Fault, losses
from tests.faults.test_faults import check_same_run

pytestmark = pytest.mark.slow


def environment(folder: Path, fault: Fault | None = None) -> dict[str, str]:
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), *sys.path])),
        "FAULT_NOTES": str(notes),
        "FAULT": json.dumps(None if fault is None else asdict(fault)),
    }


def written(job: dict[str, Any], folder: Path) -> Path:
    """The job's file; how many ranks there are is the launcher's to say."""
    path = folder / "job.yaml"
    own = {key: value for key, value in job.items() if key != "num_gpus"}
    path.write_text(yaml.safe_dump({**own, "output_dir": str(folder / "run")}))
    return path


@pytest.mark.parametrize("fault", [None, Fault("backward", after=3)], ids=["whole", "killed"])
def test_torchrun_trains_and_its_restart_goes_on_from_the_checkpoint(
    job: dict[str, Any], undisturbed: Path, tmp_path: Path, fault: Fault | None
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", "2", "--max_restarts", "1"]
    ended = subprocess.run(
        [*torchrun, "-m", "tightfit", "train", str(written(job, tmp_path))],
        env=environment(tmp_path, fault),
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    check_same_run(tmp_path / "run", undisturbed)


def test_ranks_of_srun_train(job: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    path = written(job, tmp_path)
    processes = []
    for rank in range(2):
        own = {
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NODELIST": "localhost",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tightfit", "train", str(path)],
                env=environment(tmp_path) | own,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=HANGS_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert list(losses(tmp_path / "run")) == list(losses(undisturbed))
    check_same_run(tmp_path / "run", undisturbed)
