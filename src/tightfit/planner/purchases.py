"""What buying would change: the same job planned again for a machine with one part more or faster.

For machines that a job describes, whose parts have rates of their own. Of the machine at hand only
RAM can be asked about: nobody knows how cards would be linked that are not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tightfit.errors import ConfigError, DoesNotFitError, UnsupportedError
from tightfit.facts.job import Job
from tightfit.facts.machine import Machine, machine_of
from tightfit.facts.machine_words import (
    MOST_NETWORK_RATE,
    MOST_RAM_BYTES,
    parse_network,
    parse_ram,
)
from tightfit.planner.plan import Plan
from tightfit.planner.words import describe_policies
from tightfit.units import GIB, format_bytes

_MORE_RAM = 64 * GIB
_LARGEST_SERVER = 8  # cards in a machine; more come as more machines
_FASTER_NETWORK = 4


@dataclass(frozen=True)
class Purchase:
    """One part more or faster.

    Attributes:
        name: of the part.
        speedup: how often a step's time now is its time then; None where the job cannot be planned
            with it.
        said: the plan then, or why there is none.
    """

    name: str
    speedup: float | None
    said: str

    def __str__(self) -> str:
        times = "no plan" if self.speedup is None else f"{self.speedup:.1f}x"
        return f"{self.name}: {times} ({self.said})"

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        return {"name": self.name, "speedup": self.speedup, "said": self.said}


def purchases(job: Job, plan: Plan, plan_again: Callable[[Job], Plan]) -> Iterator[Purchase]:
    """What each part would change, the global batch staying as it is.

    Args:
        plan: of `job`.
        plan_again: plans another job with the same model; raises as `plan_job`.
    """
    for name, keys in _parts(job, plan):
        try:
            found = plan_again(job.with_keys(keys))
        except (ConfigError, DoesNotFitError, UnsupportedError) as error:
            yield Purchase(name, None, str(error).splitlines()[0])
            continue
        speedup = plan.step_time.total / found.step_time.total
        same = found.policies == plan.policies
        yield Purchase(
            name, speedup, "the same plan" if same else describe_policies(found.policies)
        )


def _parts(job: Job, plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    """The parts, and the keys of the job that describe a machine with them."""
    machine = machine_of(job)
    if machine is not None:
        yield from _cards(job, machine)
        yield from _links(job, machine)
    yield from _ram(job, plan)


def more_cards(job: Job) -> Iterator[tuple[str, Job]]:
    """A described job on more cards, if its batch can be divided among them."""
    machine = machine_of(job)
    if machine is None:
        return
    for name, keys in _cards(job, machine):
        try:
            yield name, job.with_keys(keys)
        except ConfigError:
            continue


def _cards(job: Job, machine: Machine) -> Iterator[tuple[str, dict[str, object]]]:
    """Twice as many: in the machine as long as they are few, then as more machines."""
    assert job.gpu is not None
    count, nodes = machine.cards_per_node, machine.nodes
    if nodes == 1 and count < _LARGEST_SERVER:
        name = "a second card" if count == 1 else f"{2 * count} cards instead of {count}"
        card = re.sub(r"^\s*\d+\s*[x×*]\s*", "", job.gpu)
        yield name, {"gpu": f"{2 * count}x{card}"}
    else:
        name = "a second machine" if nodes == 1 else f"{2 * nodes} machines instead of {nodes}"
        yield name, {"nnodes": 2 * nodes}


def _links(job: Job, machine: Machine) -> Iterator[tuple[str, dict[str, object]]]:
    fabric, count = machine.card.fabric, machine.cards_per_node
    if fabric is not None and 1 < count <= fabric.cards and not machine.has_fabric:
        yield fabric.name, {"interconnect": f"nvlink,pcie{machine.pcie.generation}"}
    if machine.nodes > 1 and job.network is not None:
        rate = _FASTER_NETWORK * parse_network(job.network)
        if rate <= MOST_NETWORK_RATE:
            faster = f"{rate * 8 / 1e9:g}Gb"
            yield f"a network {_FASTER_NETWORK} times as fast", {"network": faster}


def _ram(job: Job, plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    """64 GiB, or where there is more as much again, at the same rate, if a machine can have it."""
    if job.ram is not None:
        now = parse_ram(job.ram).total_bytes
        _, at, rate = job.ram.partition("@")
        more = max(_MORE_RAM, now)
        if now + more <= MOST_RAM_BYTES:
            yield f"{format_bytes(more)} more RAM", {"ram": f"{now + more}B{at}{rate}"}
    elif plan.limits.host_bytes is not None and machine_of(job) is None:
        more = _MORE_RAM
        yield (
            f"{format_bytes(more)} more RAM",
            {"host_memory_limit": f"{plan.limits.host_bytes + more}B"},
        )
