"""SLURM's short forms, read back from what they were made of."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.errors import ConfigError
from tightfit.launch.nodelist import hosts_of, tasks_of


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a[1-2],b,c[9-11]", ["a1", "a2", "b", "c9", "c10", "c11"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("gpu-[098-101].cluster", [f"gpu-{n}.cluster" for n in ("098", "099", "100", "101")]),
    ],
)
def test_hosts(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist", ["", "a,", "n[1-", "n1]", "n[]", "n[a-b]", "n[[1]]", "n[1-2-3]"]
)
def test_what_is_no_list_is_refused(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        hosts_of(nodelist)


@pytest.mark.parametrize(("counts", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1])])
def test_tasks(counts: str, tasks: list[int]) -> None:
    assert tasks_of(counts) == tasks


@pytest.mark.parametrize("counts", ["", "x3", "2(x)", "2(3)", "2,,1"])
def test_what_are_no_tasks_is_refused(counts: str) -> None:
    with pytest.raises(ConfigError, match="tasks per node"):
        tasks_of(counts)


names = st.from_regex(r"[a-z]([a-z0-9.-]{0,6}[a-z])?", fullmatch=True)
spans = st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(1, 5))


@st.composite
def parts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One part of a list, and its hosts counted out."""
    name, ranges = draw(names), draw(st.lists(spans, max_size=4))
    if not ranges:
        return name, [name]
    texts, hosts = [], []
    for first, more, width in ranges:
        numbers = [
            str(n).zfill(max(width, len(str(first)))) for n in range(first, first + more + 1)
        ]
        texts.append(numbers[0] if more == 0 else f"{numbers[0]}-{numbers[-1]}")
        hosts += [name + number for number in numbers]
    return f"{name}[{','.join(texts)}]", hosts


@given(st.lists(parts(), min_size=1, max_size=5))
def test_every_list_gives_the_hosts_it_was_made_of(made: list[tuple[str, list[str]]]) -> None:
    assert hosts_of(",".join(text for text, _ in made)) == [
        host for _, hosts in made for host in hosts
    ]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_so_does_every_list_of_tasks(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(n) if times == 1 else f"{n}(x{times})" for n, times in runs)
    assert tasks_of(text) == [n for n, times in runs for _ in range(times)]


@given(st.text(alphabet="a1[],-", max_size=12))
def test_whatever_is_given_is_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        assert all(hosts_of(text))
