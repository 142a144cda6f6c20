"""Where ranks begin that start again: at the last checkpoint of their run, or at its start."""

from __future__ import annotations

from pathlib import Path

from tightfit.facts.job import Job
from tightfit.launch.environment import BEGIN, Environment

AS_THE_JOB_SAYS = "as the job says"
RESUME = "resume"
AFRESH = "afresh"


def begins_again(job: Job) -> tuple[str, str]:
    """What ranks begin from after a failure, for their environment and for people.

    Raises:
        ConfigError: the last checkpoint cannot be resumed, and starting afresh would delete it.
    """
    # Brings transformers, which a supervisor needs for nothing else.
    from tightfit.training.checkpoint import read_progress
    from tightfit.training.checkpoint_folders import latest_checkpoint

    checkpoint = latest_checkpoint(Path(job.output_dir or "."))
    if checkpoint is None:
        return AFRESH, "from the start (nothing was saved yet)"
    read_progress(checkpoint)
    return RESUME, f"from {checkpoint}"


def job_begun(job: Job, attempt: int, environment: Environment) -> Job:
    """The job of a rank: after a failure it goes on with its own run, whatever was there first.

    torchrun says only that it is another attempt, so that ranks look for themselves: nothing is
    written before all have.

    Args:
        attempt: how often all ranks were started before.

    Raises:
        ConfigError: as of `begins_again`.
    """
    begin = environment.get(BEGIN)
    if begin is None:
        begin = begins_again(job)[0] if attempt else AS_THE_JOB_SAYS
    if begin == AS_THE_JOB_SAYS:
        return job
    keys = {"resume": begin == RESUME, "overwrite_output_dir": begin == AFRESH}
    return job.model_copy(update=keys)
