"""SLURM's short forms: lists of hosts (`node[01-03,07]`) and of counts (`2(x3),1`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from tightfit.errors import ConfigError

_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of(nodelist: str) -> list[str]:
    """All hosts of a list, in its order; leading zeros are kept.

    Raises:
        ConfigError: it is not such a list.
    """
    return [host for part in _split(nodelist) for host in _expanded(part, nodelist)]


def tasks_of(counts: str) -> list[int]:
    """Tasks of each host, of `SLURM_STEP_TASKS_PER_NODE`: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ConfigError: it is not such a list.
    """
    found: list[int] = []
    for part in counts.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"SLURM's tasks per node {counts!r} cannot be read")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _split(nodelist: str) -> Iterator[str]:
    """The parts between commas that are not inside brackets."""
    depth, begin = 0, 0
    for place, letter in enumerate(nodelist):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield nodelist[begin:place]
            begin = place + 1
    yield nodelist[begin:]


def _expanded(part: str, nodelist: str) -> Iterator[str]:
    """Every combination of a host's ranges: `rack[1-2]n[1-2]` is four hosts."""
    texts = _PART.split(part.strip())  # text, inside of brackets, text, ...
    if not part.strip() or "[" in "".join(texts[::2]) or "]" in "".join(texts[::2]):
        raise ConfigError(f"SLURM's node list {nodelist!r} cannot be read")
    choices = [
        [text] if index % 2 == 0 else list(_numbers(text, nodelist))
        for index, text in enumerate(texts)
    ]
    return ("".join(choice) for choice in product(*choices))


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"SLURM's node list {nodelist!r} cannot be read")
        first, last = match[1], match[2] or match[1]
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
