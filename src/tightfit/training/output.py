"""The folder of a run: who may write there, and what a run writes.

Nothing that is there is overwritten unless the job says so, and then only what a run wrote. Knows
names, not what is in the files.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tightfit.errors import ConfigError
from tightfit.facts.disk import check_is_disk, check_writable
from tightfit.facts.job import Job
from tightfit.training.checkpoint_folders import latest_checkpoint

LOG = "trainer_log.jsonl"
PLAN = "plan.yaml"
TRIED = "plan.tried.yaml"  # of a run that changes its plan, until the first step with it is done
REPORT = "report.json"
_CHECKPOINT = re.compile(r"checkpoint-\d+|\.checkpoint-\d+\.incomplete")


def check_output_dir(job: Job) -> tuple[Path, Path | None]:
    """The job's output folder and the checkpoint to resume from; changes nothing.

    Raises:
        ConfigError: no folder is named, it cannot be written to, it holds another run or what
            the job needs, or there is nothing to resume.
    """
    if job.output_dir is None:
        raise ConfigError("output_dir is missing: name the folder for checkpoints and logs")
    folder = Path(job.output_dir)
    check_writable("output_dir", folder)
    if job.names_disk:
        check_is_disk(job.disk_folder)
        check_writable("offload_folder", job.disk_folder)
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
    _check_not_needed(present, job)
    return folder, None


def _check_not_needed(to_delete: list[Path], job: Job) -> None:
    """Nothing that the job reads lies in what it would delete first."""
    for key in ("model_name_or_path", "dataset", "eval_dataset"):
        name = getattr(job, key)
        path = None if name is None else Path(name).resolve()
        if path is not None and any(path.is_relative_to(old.resolve()) for old in to_delete):
            raise ConfigError(
                f"overwrite_output_dir would delete {name}, which the job needs ({key}); "
                "give another output_dir"
            )


def open_output_dir(job: Job, folder: Path) -> None:
    """Make the folder; delete the run in it if the job says so.

    Called when all else was checked, so that a job that cannot run deletes nothing.

    Raises:
        ConfigError: the folder cannot be made, or what is in it not deleted.
    """
    try:
        if job.overwrite_output_dir:
            for path in _of_a_run(folder):
                is_folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path) if is_folder else path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be used: {error}") from None


def _to_resume(folder: Path) -> Path:
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise ConfigError(f"nothing to resume: {folder} has no checkpoint-N folder")
    return checkpoint


def _of_a_run(folder: Path) -> list[Path]:
    """What a run wrote into `folder`."""
    if not folder.is_dir():
        return []
    names = (LOG, PLAN, TRIED, REPORT)
    return [
        path for path in folder.iterdir() if path.name in names or _CHECKPOINT.fullmatch(path.name)
    ]
