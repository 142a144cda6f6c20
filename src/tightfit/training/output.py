"""The folder of a run: who may write there, and what a run writes.

Nothing that is there is overwritten unless the job says so, and then only what a run wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.training.checkpoint import latest_checkpoint

LOG = "trainer_log.jsonl"
PLAN = "plan.yaml"
REPORT = "report.json"


def check_output_dir(job: Job) -> tuple[Path, Path | None]:
    """The job's output folder and the checkpoint to resume from; changes nothing.

    Raises:
        ConfigError: no folder is named, it holds another run, or there is nothing to resume.
    """
    if job.output_dir is None:
        raise ConfigError("output_dir is missing: name the folder for checkpoints and logs")
    folder = Path(job.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file, not a folder")
    if job.resume and job.overwrite_output_dir:
        raise ConfigError("resume and overwrite_output_dir contradict each other; give one")
    if job.resume:
        return folder, _to_resume(folder)
    present = _of_a_run(folder)
    if present and not job.overwrite_output_dir:
        names = ", ".join(sorted(path.name for path in present))
        raise ConfigError(
            f"output_dir {folder} already holds a run ({names}); give --resume to continue it, "
            "--overwrite_output_dir to delete it, or another output_dir"
        )
    return folder, None


def open_output_dir(job: Job, folder: Path) -> None:
    """Make the folder; delete the run in it if the job says so.

    Called when all else was checked, so that a job that cannot run deletes nothing.
    """
    if job.overwrite_output_dir:
        for path in _of_a_run(folder):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def _to_resume(folder: Path) -> Path:
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise ConfigError(f"nothing to resume: {folder} has no checkpoint-N folder")
    return checkpoint


def _of_a_run(folder: Path) -> list[Path]:
    """What a run wrote into `folder`."""
    if not folder.is_dir():
        return []
    names = (LOG, PLAN, REPORT)
    return [
        path
        for path in folder.iterdir()
        if path.name in names or path.name.removeprefix(".").startswith("checkpoint-")
    ]
