"""Shares of a machine's processors, on machines drawn up as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.facts.processors import (
    node_bytes,
    numa_nodes,
    parse_cpu_list,
    share_of,
    threads_of,
)
from tightfit.units import GIB


def machine(folder: Path, nodes: list[str], threads_per_core: int = 1) -> tuple[Path, Path]:
    """Folders as Linux shows its NUMA nodes and its processors; neighbours share a core."""
    for number, cpus in enumerate(nodes):
        (folder / f"nodes/node{number}").mkdir(parents=True)
        (folder / f"nodes/node{number}/cpulist").write_text(cpus + "\n")
    for number in range(32):
        topology = folder / f"cpus/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(str(number // threads_per_core))
    return folder / "nodes", folder / "cpus"


@pytest.mark.parametrize(
    ("nodes", "ranks", "shares"),
    [
        (["0-7"], 2, ["0-7", "0-7"]),
        (["0-3", "4-7"], 2, ["0-3", "4-7"]),
        (["0-3", "4-7"], 4, ["0-3", "0-3", "4-7", "4-7"]),
        (["0-3", "4-7"], 3, ["0-3", "0-3", "4-7"]),
        (["0-3", "4-7"], 1, ["0-7"]),
        (["0-3", "8-11"], 2, ["0-7", "0-7"]),  # of the second none may be used
        ([], 2, ["0-7", "0-7"]),
    ],
)
def test_ranks_stay_on_a_node(
    tmp_path: Path, nodes: list[str], ranks: int, shares: list[str]
) -> None:
    folder, _ = machine(tmp_path, nodes)
    found = [share_of(rank, ranks, set(range(8)), folder) for rank in range(ranks)]
    expected = [tuple(map(int, share.split("-"))) for share in shares]
    assert found == [set(range(first, last + 1)) for first, last in expected]


@pytest.mark.parametrize(
    ("nodes", "ranks", "threads_per_core", "quota", "threads"),
    [
        (["0-15"], 1, 1, None, [16]),
        (["0-15"], 4, 1, None, [4, 4, 4, 4]),
        (["0-15"], 4, 2, None, [2, 2, 2, 2]),
        (["0-7", "8-15"], 3, 1, None, [4, 4, 8]),
        (["0-15"], 32, 1, None, [1] * 32),
        (["0-15"], 2, 1, 6.5, [3, 3]),
        (["0-15"], 2, 1, 0.5, [1, 1]),
    ],
)
def test_threads_are_cores_shared_out(
    tmp_path: Path,
    nodes: list[str],
    ranks: int,
    threads_per_core: int,
    quota: float | None,
    threads: list[int],
) -> None:
    folder, cpus = machine(tmp_path, nodes, threads_per_core)
    found = [
        threads_of(rank, ranks, set(range(16)), quota=quota, nodes=folder, cpus=cpus)
        for rank in range(ranks)
    ]
    assert found == threads


def test_every_processor_is_a_core_where_nobody_says_more(tmp_path: Path) -> None:
    assert threads_of(0, 2, {0, 1, 2, 3}, nodes=tmp_path, cpus=tmp_path) == 2


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_linux_writes_them(numbers: set[int]) -> None:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) + "\n"
    assert parse_cpu_list(text) == numbers


def test_nodes_come_in_their_order(tmp_path: Path) -> None:
    folder, _ = machine(tmp_path, [str(number) for number in range(11)])
    assert numa_nodes(folder) == [{number} for number in range(11)]


def test_nodes_have_memory(tmp_path: Path) -> None:
    folder, _ = machine(tmp_path, ["0-1", ""])
    assert node_bytes(folder) == []
    for number, kilobytes in enumerate((64 * 2**20, 2**20)):
        said = f"Node {number} MemTotal:  {kilobytes} kB\nNode {number} MemFree:  77 kB\n"
        (folder / f"node{number}/meminfo").write_text(said)
    assert node_bytes(folder) == [64 * GIB, GIB]
    (folder / "node1/meminfo").write_text("Node 1 MemFree:  77 kB\n")
    assert node_bytes(folder) == []
