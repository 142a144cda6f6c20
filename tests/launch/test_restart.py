"""From where a rank goes on after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.facts.job import Job
from tightfit.launch.environment import BEGIN
from tightfit.launch.restart import job_begun


def job(folder: Path) -> Job:
    return Job(model_name_or_path="m", output_dir=str(folder), overwrite_output_dir=True)


@pytest.mark.parametrize(
    ("attempt", "environment", "saved", "resume", "overwrite"),
    [
        (0, {}, True, False, True),  # as the job says
        (1, {BEGIN: "as the job says"}, True, False, True),
        (1, {BEGIN: "resume"}, True, True, False),
        (1, {BEGIN: "afresh"}, False, False, True),
        (1, {}, True, True, False),  # torchrun's
        (1, {}, False, False, True),
    ],
)
def test_begins(
    tmp_path: Path,
    attempt: int,
    environment: dict[str, str],
    saved: bool,
    resume: bool,
    overwrite: bool,
) -> None:
    if saved:
        checkpoint = tmp_path / "checkpoint-3"
        checkpoint.mkdir()
        (checkpoint / "optimizer.safetensors").touch()
        (checkpoint / "trainer_state.json").write_text(
            '{"step": 3, "epoch": 0, "steps_in_epoch": 3, "global_batch_size": 1, '
            '"train_samples": 9, "seed": 42}'
        )
    begun = job_begun(job(tmp_path), attempt, environment)
    assert (begun.resume, begun.overwrite_output_dir) == (resume, overwrite)
