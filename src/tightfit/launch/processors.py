"""Keeps a rank on its share of the machine's processors, near each other where the machine has
several NUMA nodes.

torchrun leaves every rank with one thread; here a rank has its share of the cores, which
`facts/processors.py` works out. Knows nothing of what they compute.
"""

from __future__ import annotations

import os

import torch

from tightfit.facts.processors import cpu_quota, share_of, threads_of
from tightfit.launch.environment import Environment, RankPlace

THREADS = "OMP_NUM_THREADS"


def settle(local_rank: int, ranks_here: int, environment: Environment) -> None:
    """Keep the calling process on its share and give torch as many threads as that has cores,
    unless the user has said how many; before it has started threads, which inherit the share.
    """
    allowed = os.sched_getaffinity(0)
    threads = threads_of(local_rank, ranks_here, allowed, quota=cpu_quota())
    os.sched_setaffinity(0, share_of(local_rank, ranks_here, allowed))
    if not said_by_user(environment):
        torch.set_num_threads(threads)


def threads_variable(place: RankPlace) -> dict[str, str]:
    """What the environment of a rank says of its threads before it is started: what the user has
    said, or the cores of its share."""
    threads = threads_of(
        place.local_rank, place.local_world_size, os.sched_getaffinity(0), quota=cpu_quota()
    )
    return {THREADS: os.environ.get(THREADS, str(threads))}


def said_by_user(environment: Environment) -> bool:
    """Whether the user has set the number of threads: torchrun sets 1 where nobody has, which
    cannot be told from a user's own 1 there."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and environment.get(THREADS) == "1"
    return THREADS in environment and not by_torchrun
