"""The processors of a machine: its NUMA nodes and cores, and each rank's share of them.

Reads `/sys`; where that says nothing there is one node, and every processor is a core. Changes
nothing and knows nothing of what is computed.
"""

from __future__ import annotations

import re
from pathlib import Path

from tightfit.facts.cgroup import read_cgroup_limits
from tightfit.units import KIB

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_TOTAL = re.compile(r"MemTotal:\s*(\d+) kB")


def share_of(local_rank: int, ranks_here: int, allowed: set[int], nodes: Path = _NODES) -> set[int]:
    """The processors that a rank should stay on: those of one NUMA node, the nodes dealt out among
    ranks in order; all that are allowed where there is one node, or more nodes than ranks.

    Args:
        allowed: that this process may use.
    """
    usable = [cpus & allowed for cpus in numa_nodes(nodes) if cpus & allowed]
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


def cpu_quota() -> float | None:
    """Processor time per second that the container of this process may take, in cores."""
    return read_cgroup_limits(Path("/proc"), Path("/sys")).cpus


def numa_nodes(folder: Path = _NODES) -> list[set[int]]:
    """Processors of each NUMA node, in order; empty where the machine does not say."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [parse_cpu_list(path.read_text(encoding="ascii")) for path in lists]


def node_bytes(folder: Path = _NODES) -> list[int]:
    """Memory of each NUMA node, in the order of `numa_nodes`; empty where the machine does not say
    it of all."""
    files = sorted(folder.glob("node[0-9]*/meminfo"), key=lambda path: int(path.parent.name[4:]))
    found = [_TOTAL.search(path.read_text(encoding="ascii")) for path in files]
    sizes = [int(match[1]) * KIB for match in found if match is not None]
    return sizes if len(sizes) == len(numa_nodes(folder)) else []


def parse_cpu_list(text: str) -> set[int]:
    """Numbers of a list as Linux writes it, such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
