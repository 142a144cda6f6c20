"""Which of a job's keys about a described machine contradict each other, in the words of the keys.

Knows what each key says (`machine_words.py`), not what becomes of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tightfit.errors import ConfigError
from tightfit.facts.machine_words import (
    Cards,
    parse_cards,
    parse_interconnect,
    parse_nvme,
    parse_ram,
)
from tightfit.units import format_bytes, parse_bytes

# Keys that say nothing without `gpu`, and what says the same of the machine at hand.
_PARTS = {
    "ram": "give host_memory_limit",
    "nvme": "give nvme_limit",
    "interconnect": "leave it out: links are measured",
    "network": "leave it out: links are measured",
}
MACHINE_KEYS = ("gpu", *_PARTS)


def with_cards_of_gpu(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a job with `num_gpus`, where only `gpu` says how many cards there are."""
    if values.get("gpu") is None or "num_gpus" in values:
        return values
    try:
        count = parse_cards(str(values["gpu"])).count
    except ValueError:
        return values  # the key's own check says what is wrong
    return values if count is None else {**values, "num_gpus": count}


def machine_contradictions(job: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each, naming what to change.

    Args:
        job: all keys of a job, each checked by itself.
    """
    if job["gpu"] is None:
        for key, instead in _PARTS.items():
            if job[key] is not None:
                yield (
                    f"{key}: {job[key]} describes a machine, and gpu does not say which card it "
                    f"has; give gpu, or for this machine {instead}"
                )
        return
    cards = parse_cards(job["gpu"])
    yield from _of_cards(job, cards)
    yield from _of_memory(job, cards)
    if job["network"] is not None and job["nnodes"] == 1:
        yield (
            f"network: {job['network']} is between machines, and nnodes is 1; give nodes, or leave "
            "network out"
        )


def _of_cards(job: Mapping[str, Any], cards: Cards) -> Iterator[str]:
    used, fabric = job["num_gpus"], cards.card.fabric
    if cards.count is not None and used > cards.count:
        plural = "card" if cards.count == 1 else "cards"
        yield (
            f"num_gpus {used}, but gpu {job['gpu']} is {cards.count} {plural}; change the one or "
            "the other"
        )
    if job["interconnect"] is None or not parse_interconnect(job["interconnect"]).fabric:
        return
    if fabric is None:
        yield (
            f"interconnect: {job['interconnect']}, but {cards.card.name} has no such link; its "
            f"cards are joined by pcie{cards.card.pcie.generation}"
        )
    elif used > fabric.cards:
        yield (
            f"interconnect: {job['interconnect']} joins {fabric.cards} of {cards.card.name}, and "
            f"the job uses {used} on each machine; leave interconnect out"
        )


def _of_memory(job: Mapping[str, Any], cards: Cards) -> Iterator[str]:
    yield from _more_than(
        job, "memory_limit", cards.card.usable_bytes, f"one {cards.card.name} gives"
    )
    if job["ram"] is not None:
        total = parse_ram(job["ram"]).total_bytes
        yield from _more_than(job, "host_memory_limit", total, f"there are with ram {job['ram']}")
    if job["nvme"] is not None:
        total = parse_nvme(job["nvme"]).total_bytes
        yield from _more_than(job, "nvme_limit", total, f"there are with nvme {job['nvme']}")


def _more_than(job: Mapping[str, Any], key: str, most: int, whose: str) -> Iterator[str]:
    limit = job[key]
    if limit not in ("auto", "none") and parse_bytes(limit) > most:
        yield f"{key} {limit} is more than the {format_bytes(most)} that {whose}; lower it"


def check_is_for_here(keys: Mapping[str, Any]) -> None:
    """See that a job that is about to run describes no other machine.

    Raises:
        ConfigError: it does.
    """
    described = [key for key in MACHINE_KEYS if keys[key] is not None]
    if described:
        raise ConfigError(
            f"{', '.join(described)}: a described machine can be planned for (`tightfit plan`, "
            "`tightfit estimate`); `tightfit train` runs on this one: leave them out, and give "
            "memory_limit or host_memory_limit to stay within another one's memory"
        )
