"""Ranks as real processes: small scripts that join a group on gloo and do one thing.

The sources come to them as they come to the tests, through the path of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tightfit.facts.job import Job

# What `tightfit train` does around the training of a rank, with `act(place)` in its stead.
FRAME = """
import os, signal, sys
from pathlib import Path
from tightfit.errors import ConfigError, Interrupted, TrainingError
from tightfit.launch.environment import BEGIN, place_here
from tightfit.launch.failures import Reporting
from tightfit.launch.lifeline import hold_lifeline

folder = Path(sys.argv[1])
place = place_here(os.environ)
hold_lifeline(os.environ)

def note(name, text=""):
    path = folder / f".{name}"
    path.write_text(str(text))
    path.rename(folder / name)

def tell(pipe, text="now"):
    # Returns when somebody reads.
    Path(folder / pipe).write_text(str(text))

def wait_for(pipe):
    # Returns when somebody has written.
    return Path(folder / pipe).read_text()

def wait_for_the_end():
    while True: signal.pause()
"""
JOINING = """
import torch
import torch.distributed as dist
from tightfit.launch.group import from_first, meet, process_group

facts = {"python": "3"}
timeout_seconds = 60.0

def add_up():
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)
"""
ALONE = """
with Reporting.of(place.rank, os.environ):
    act(place)
"""
TOGETHER = """
with Reporting.of(place.rank, os.environ):
    before(place)
    store = meet(place, facts, timeout_seconds)
    with process_group(place, store, "cpu", timeout_seconds):
        act(place)
"""

Script = Callable[..., list[str]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A command line of ranks that do `act`; with `joins` in a process group, and before they join
    `before`. Those that do not join need no torch, and start at once."""

    def make(act: str, before: str = "pass", frame: str = "", *, joins: bool = False) -> list[str]:
        parts = [FRAME, frame, _function("act", act), ALONE]
        if joins:
            parts = [FRAME, JOINING, frame]
            parts += [_function("before", before), _function("act", act), TOGETHER]
        path = tmp_path / "rank.py"
        path.write_text("\n".join(parts))
        return [sys.executable, str(path), str(tmp_path)]

    return make


def _function(name: str, body: str) -> str:
    return f"def {name}(place):\n{textwrap.indent(textwrap.dedent(body), '    ')}"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """A job of two ranks; nobody looks at its model here."""

    def make(**keys: Any) -> Job:
        keys = {"num_gpus": 2, "output_dir": str(tmp_path / "run"), "ddp_timeout": 60} | keys
        return Job(model_name_or_path="a-model", **keys)

    return make


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take a core each, and find the sources where the tests do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A supervisor in a process of its own: of a command, with keys of the job."""
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str], **keys: Any) -> subprocess.Popen[str]:
        keys = {"num_gpus": 2, "output_dir": str(tmp_path / "run"), "ddp_timeout": 60} | keys
        code = (
            "import sys\n"
            "from tightfit.errors import TightfitError\n"
            "from tightfit.facts.job import Job\n"
            "from tightfit.launch.supervisor import supervise\n"
            f"job = Job(model_name_or_path='a-model', **{keys!r})\n"
            "try:\n"
            f"    supervise(job, {command!r}, print)\n"
            "except TightfitError as error:\n"
            "    print(error, file=sys.stderr)\n"
            "    sys.exit(error.exit_code)\n"
            "except KeyboardInterrupt:\n"
            "    sys.exit(130)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # closes its pipes and waits for it
            process.kill()
