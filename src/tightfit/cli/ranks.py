"""`tightfit train` of several ranks: what a rank does around the training, and their supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tightfit.cli.train import run
from tightfit.facts.job import Job
from tightfit.facts.model_spec import load_model_spec
from tightfit.launch.environment import RankPlace, check_counts
from tightfit.launch.processors import settle
from tightfit.launch.restart import job_begun
from tightfit.launch.supervisor import supervise
from tightfit.training.model import check_weights


def run_as_rank(job: Job, place: RankPlace) -> int:
    """Train as one of the ranks that a launcher has started; returns the exit code."""
    check_counts(job, place)
    settle(place.local_rank, place.local_world_size, os.environ)
    return run(job_begun(job, place.attempt, os.environ), place)


def run_as_supervisor(job: Job, argv: Sequence[str]) -> int:
    """Start the job's ranks on this machine and watch them; returns the exit code.

    Args:
        argv: of the command line, which ranks are started with too.
    """
    _check(job)
    supervise(job, [sys.executable, "-m", "tightfit", *argv], _say)
    return 0


def _check(job: Job) -> None:
    """Find once, before there are many ranks, what takes no time to find.

    Raises:
        InputError: a mistake in the model.
    """
    spec = load_model_spec(job.model_name_or_path)
    folder = Path(job.model_name_or_path).expanduser()
    if spec.source not in ("catalogue", "file", "hub"):
        check_weights(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
