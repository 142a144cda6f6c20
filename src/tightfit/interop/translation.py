"""Collects what a foreign config becomes: keys of a job, and a note for every key that was there.

Readers take values out of it and say what they mean; what nobody took is noted with the words of
its table. Knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.errors import ConfigError, UnsupportedError
from tightfit.interop.entries import AUTO, Found, shown

SAME = "the same"  # what a key becomes that asks for what happens here anyway


@dataclass(frozen=True)
class Note:
    """What became of one key.

    Attributes:
        key: in the words of the tool it comes from; empty for what the config does not say.
        value: as written.
        here: the keys of a job that it sets; empty where it has no counterpart.
        why: what happens instead, or what is different; may be empty.
    """

    key: str
    value: str
    here: str
    why: str


@dataclass(frozen=True)
class Ranks:
    """How many processes a config is for, where the config itself does not say."""

    num_gpus: int = 1
    nnodes: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        width = self.tensor_parallel_size * self.pipeline_parallel_size
        return max(1, self.num_gpus * self.nnodes // width)


@dataclass
class Translation:
    """The keys of a job that a config becomes.

    Attributes:
        found: the config's keys, by the names of their table.
        ranks: that the config is for.
        keys: of a job, that the config says.
        implied: keys that it means by saying nothing; anything else that is said wins over them.
        places: file, line and key that each of `keys` comes from.
        notes: in the order in which they were made.
    """

    found: Mapping[str, Found]
    ranks: Ranks = field(default_factory=Ranks)
    keys: dict[str, Any] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Whether the config says something about `key`, be it `auto`."""
        return key in self.found

    def take(self, key: str) -> Any:
        """The value of `key`; None where it is not there or `auto`, which is noted."""
        found = self.found.get(key)
        if found is None:
            return None
        if found.value == AUTO:
            if key not in self._taken:
                self.say(key, "", "as the job says, else the planner decides")
            return None
        return found.value

    def become(self, key: str, why: str = "", **own: Any) -> None:
        """`key` sets these keys of a job.

        Raises:
            ConfigError: another key of the config has set one of them to something else.
        """
        place = self.found[key].place
        for name, value in own.items():
            if name in self.keys and self.keys[name] != value:
                raise ConfigError(
                    f"{place} and {self.places[name]} contradict: they make {name} "
                    f"{shown(value)} and {shown(self.keys[name])}; keep one"
                )
            self.keys[name], self.places[name] = value, place
        here = ", ".join(f"{name}: {shown(value).strip(chr(39))}" for name, value in own.items())
        self.say(key, here, why)

    def copy(self, key: str, own: str, why: str = "") -> None:
        """`key`, where it is there, sets a job's key `own` to its value."""
        value = self.take(key)
        if value is not None:
            self.become(key, why, **{own: value})

    def imply(self, why: str, **own: Any) -> None:
        """What the config's silence means."""
        self.implied |= own
        here = ", ".join(f"{name}: {shown(value).strip(chr(39))}" for name, value in own.items())
        self.notes.append(Note("", "", here, why))

    def say(self, key: str, here: str, why: str) -> None:
        """Note what becomes of `key`."""
        found = self.found[key]
        self._taken.add(key)
        value = shown(found.value).strip("'")
        self.notes.append(Note(found.written, value, here, why or found.entry.here))

    def refuse(self, key: str, why: str) -> UnsupportedError:
        """The error to raise about the value of `key`."""
        found = self.found[key]
        return UnsupportedError(f"{found.place}: {shown(found.value)} cannot be had here; {why}")

    def finish(self) -> None:
        """Note every key that nobody took, in the words of its table.

        Raises:
            UnsupportedError: one of them makes the run another and has no counterpart.
        """
        for key, found in self.found.items():
            if key in self._taken:
                continue
            if found.value in found.entry.usual or is_off(found):
                self.say(key, SAME, "")
                continue
            if found.entry.refused and found.value != AUTO:
                raise self.refuse(key, found.entry.here)
            self.say(key, "", "")
        order = {found.written: number for number, found in enumerate(self.found.values())}
        self.notes.sort(key=lambda note: order.get(note.key, len(order)))


def is_off(found: Found) -> bool:
    """Whether a key that has no counterpart asks for nothing."""
    value = found.value
    if isinstance(value, dict):
        return not value or value.get("enabled") is False
    return value is False or value in ("", [])
