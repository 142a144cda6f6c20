"""The processors of a rank: its share of the machine's, near each other where the machine has
several NUMA nodes.

torchrun leaves every rank with one thread; here a rank has its share of the cores. Knows nothing
of what they compute.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tightfit.engine.host_threads import parse_cpu_list
from tightfit.facts.cgroup import read_cgroup_limits
from tightfit.launch.environment import Environment

THREADS = "OMP_NUM_THREADS"
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


def share_of(local_rank: int, ranks_here: int, allowed: set[int], nodes: Path = _NODES) -> set[int]:
    """The processors that a rank should stay on: those of one NUMA node, the nodes dealt out among
    ranks in order; all that are allowed where there is one node, or more nodes than ranks.

    Args:
        allowed: that this process may use.
    """
    usable = [cpus & allowed for cpus in _numa_nodes(nodes) if cpus & allowed]
    if len(usable) < 2 or ranks_here < len(usable):
        return allowed
    return usable[local_rank * len(usable) // ranks_here]


def threads_of(
    local_rank: int,
    ranks_here: int,
    allowed: set[int],
    *,
    quota: float | None = None,
    nodes: Path = _NODES,
    cpus: Path = _CPUS,
) -> int:
    """Threads of a rank: the cores of its processors, shared with the ranks that have the same.

    Two threads of one core count as one: they share what multiplies.

    Args:
        quota: cores that all ranks of the machine may take together; None is no limit.
    """
    own = share_of(local_rank, ranks_here, allowed, nodes)
    sharing = sum(share_of(rank, ranks_here, allowed, nodes) == own for rank in range(ranks_here))
    threads = count_cores(own, cpus) // sharing
    return max(1, threads if quota is None else min(threads, int(quota // ranks_here)))


def count_cores(processors: set[int], cpus: Path = _CPUS) -> int:
    """Cores that `processors` belong to; each is its own where the machine does not say."""
    cores = set()
    for number in processors:
        try:
            cores.add((cpus / f"cpu{number}/topology/core_cpus_list").read_text(encoding="ascii"))
        except OSError:
            cores.add(str(number))
    return len(cores)


def settle(local_rank: int, ranks_here: int, environment: Environment) -> None:
    """Keep the calling process on its share and give torch as many threads as that has cores,
    unless the user has said how many; before it has started threads, which inherit the share.
    """
    allowed = os.sched_getaffinity(0)
    threads = threads_of(local_rank, ranks_here, allowed, quota=cpu_quota())
    os.sched_setaffinity(0, share_of(local_rank, ranks_here, allowed))
    if not said_by_user(environment):
        torch.set_num_threads(threads)


def cpu_quota() -> float | None:
    """Processor time per second that the container of this process may take, in cores."""
    return read_cgroup_limits(Path("/proc"), Path("/sys")).cpus


def said_by_user(environment: Environment) -> bool:
    """Whether the user has set the number of threads: torchrun sets 1 where nobody has, which
    cannot be told from a user's own 1 there."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and environment.get(THREADS) == "1"
    return THREADS in environment and not by_torchrun


def _numa_nodes(folder: Path) -> list[set[int]]:
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [parse_cpu_list(path.read_text(encoding="ascii")) for path in lists]
