"""`tightfit convert`: the config of one tool as that of another, and what became of each key."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tightfit.cli.notes import show_left_out, show_reading
from tightfit.errors import ConfigError
from tightfit.facts.disk import check_writable
from tightfit.facts.job import Job
from tightfit.interop.conversion import convert
from tightfit.interop.formats import EXPORTS, FORMATS, format_named_by, write_config
from tightfit.interop.other_names import translate
from tightfit.interop.planned import planned_keys
from tightfit.interop.settings import read_config_file
from tightfit.interop.writing import Written
from tightfit.policies import Policies

STANDARD_OUTPUT = "-"


def run(
    source: str,
    target: str,
    overrides: Mapping[str, Any],
    *,
    from_format: str | None,
    to_format: str | None,
    force: bool,
) -> int:
    """Convert a file; returns the exit code.

    Args:
        overrides: keys of a job that win over the file's.
    """
    check_target(target, force=force)
    reading = read_config_file(source, "FROM", overrides, from_format)
    overrides = translate(overrides, "--")
    into = to_format or format_named_by(Path(target)) or "tightfit"
    if into == reading.format and to_format is None and not overrides:
        raise ConfigError(
            f"{source} is {FORMATS[into].title}'s already; say what it becomes with --to "
            f"{'|'.join(FORMATS)}"
        )
    done = convert(reading, overrides, into)
    put(target, done.written)
    console = Console(stderr=target == STANDARD_OUTPUT)
    show_reading(console, reading)
    _show_left_out(console, target, into, done.written)
    if done.missing:
        console.print(Text(f"still to say: {', '.join(done.missing)}"), soft_wrap=True)
    if target != STANDARD_OUTPUT:
        console.print(Text(f"written: {target}"), soft_wrap=True)
    return 0


@dataclass(frozen=True)
class Export:
    """Where a plan is written for another tool."""

    format: str
    target: str

    @classmethod
    def of(cls, format_name: str, target: str | None, *, force: bool) -> Export:
        """Looked at before a plan is made, which takes seconds.

        Raises:
            ConfigError: something is there already, or the folder may not be written to.
        """
        target = target or EXPORTS[format_name]
        check_target(target, force=force)
        return cls(format_name, target)

    def write(self, job: Job, policies: Policies) -> None:
        """Write the plan, and say what the other tool cannot do of it.

        Raises:
            ConfigError: the disk refuses.
        """
        written = write_config(planned_keys(job, policies), self.format)
        put(self.target, written)
        console = Console(stderr=True)
        _show_left_out(console, self.target, self.format, written)
        if self.target != STANDARD_OUTPUT:
            console.print(Text(f"written: {self.target}"), soft_wrap=True)


def _show_left_out(console: Console, target: str, format_name: str, written: Written) -> None:
    where = "what was written" if target == STANDARD_OUTPUT else target
    show_left_out(console, f"Not in {where}, for {FORMATS[format_name].title}:", written.notes)


def check_target(target: str, *, force: bool) -> None:
    """See that a file can be written.

    Raises:
        ConfigError: something is there already, or the folder may not be written to.
    """
    if target == STANDARD_OUTPUT:
        return
    if os.path.lexists(target) and not (force and Path(target).is_file()):
        raise ConfigError(
            f"{target} is there already; give another file, or --force to write over it"
        )
    check_writable(target, Path(target).parent)


def put(target: str, written: Written) -> None:
    """Write a config, all of it or nothing.

    Raises:
        ConfigError: the disk refuses.
    """
    if target == STANDARD_OUTPUT:
        sys.stdout.write(written.text)
        return
    path = Path(target)
    temporary = path.with_name(f".{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(written.text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
