"""`tightfit train` as one process, as a rank that a launcher has started, or as the supervisor that
starts ranks: which of them, and what each does around the training itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tightfit.cli import train
from tightfit.facts.job import Job
from tightfit.facts.model_spec import load_model_spec
from tightfit.launch.environment import RankPlace, job_at, place_here
from tightfit.launch.failures import Reporting
from tightfit.launch.lifeline import hold_lifeline
from tightfit.launch.processors import settle
from tightfit.launch.restart import job_begun
from tightfit.launch.supervisor import supervise
from tightfit.training.model import check_weights
from tightfit.training.output import check_output_dir


def run(job: Job, argv: Sequence[str]) -> int:
    """Train a job; returns the exit code.

    Args:
        argv: of the command line, which ranks are started with.
    """
    place = place_here(os.environ)
    if place is not None:
        return _run_rank(job, place)
    if job.ranks == 1:
        return train.run(job)
    _check(job)
    supervise(job, [sys.executable, "-m", "tightfit", *argv], _say)
    return 0


def _run_rank(job: Job, place: RankPlace) -> int:
    hold_lifeline(os.environ)
    with Reporting.of(place.rank, os.environ):
        settle(place.local_rank, place.local_world_size, os.environ)
        return train.run(job_begun(job_at(job, place), os.environ), place)


def _check(job: Job) -> None:
    """Find once, before there are many ranks, what takes no time to find.

    Raises:
        InputError: a mistake in the output folder or the model.
    """
    check_output_dir(job)
    spec = load_model_spec(job.model_name_or_path)
    folder = Path(job.model_name_or_path).expanduser()
    if spec.source not in ("catalogue", "file", "hub"):
        check_weights(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
