"""The command with several ranks, as real processes: who speaks, and with which exit code it ends.

The ranks plan on this machine's own rates; nothing here depends on them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

JobFile = Callable[..., str]


def tightfit(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "tightfit", *words],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
    )


def test_a_plan_that_does_not_fit_ends_all_ranks(job_file: JobFile, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "policies:\n"
        "  batch: {micro_batch_size: 2, accumulation_steps: 1}\n"
        "  precision: {parameters: fp32}\n"
        "  sharding: {ranks: 2, zero_stage: 2}\n"
    )
    path = job_file(num_gpus=2, plan=str(plan), memory_limit="100KiB", max_restarts=2)
    found = tightfit("train", path)
    assert found.returncode == 3
    (said,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: this plan needs"), "which is every rank's plan"
    assert found.stdout.count("samples: 8 to train") == 1
    assert not (tmp_path / "run").exists()


def test_what_is_cheap_to_find_is_found_before_there_are_ranks(job_file: JobFile) -> None:
    found = tightfit("train", job_file(num_gpus=2, output_dir=...))
    assert found.returncode == 2
    assert found.stderr.startswith("error: output_dir is missing")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {
                "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
                "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
            },
            "num_gpus: 2 contradicts the launcher, which has started 4 ranks",
        ),
        (
            {
                "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "3",
                "SLURM_LOCALID": "1", "SLURM_NODELIST": "here",
            },
            "num_gpus: 2 contradicts the launcher, which has started 3 ranks",
        ),
    ],
)  # fmt: skip
def test_a_rank_of_another_launcher_says_who_it_is(
    job_file: JobFile, variables: dict[str, str], said: str
) -> None:
    found = tightfit("train", job_file(num_gpus=2), **variables)
    assert found.returncode == 2
    assert found.stderr.startswith(f"error: rank 1 ({socket.gethostname()}, process ")
    assert said in found.stderr


LOOKING = """
import os, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch with", os.environ.get("TORCH_CPP_LOG_LEVEL"), flush=True)

sys.meta_path.insert(0, Look())
from tightfit.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [[], ["--num_gpus", "2"]], ids=["all cards", "two ranks"])
def test_torch_is_told_to_be_silent_before_it_is_loaded(
    words: list[str], tmp_path: Path, tiny_model_folder: Path
) -> None:
    argv = ["train", str(tiny_model_folder), "--dataset", "none.jsonl", "--train_batch_size", "2"]
    argv += ["--output_dir", str(tmp_path / "run"), *words]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_CPP_LOG_LEVEL"}
    ended = subprocess.run(
        [sys.executable, "-c", LOOKING, *argv], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.splitlines()[0] == "torch with ERROR"
