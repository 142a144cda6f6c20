"""Runs the real command with several ranks, of which one fails at a chosen point."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

HOOK = Path(__file__).parent / "hook"
# Far more than anything takes, far less than `ddp_timeout`: whoever waits longer hangs.
HANGS_SECONDS = 120.0
STATED_SECONDS = 600


@dataclass(frozen=True)
class Fault:
    """What befalls a rank; places and kinds are those of `hook/sitecustomize.py`.

    Attributes:
        after: steps that are done before.
    """

    place: str
    kind: str = "kill"
    rank: int = 1
    after: int = 2


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        seconds: from the fault to the end; None where nothing failed.
        left_behind: processes of its own that still run.
    """

    code: int
    out: str
    err: str
    seconds: float | None
    left_behind: list[int]

    @property
    def errors(self) -> list[str]:
        """Lines that are the beginning of an error message."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(folder: Path, job: Mapping[str, Any], *words: str, fault: Fault | None = None) -> Ended:
    """Run `tightfit train` on a job in a folder of its own.

    Args:
        words: further ones of the command line.
    """
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(dict(job)))
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), *sys.path])),
        "FAULT_NOTES": str(notes),
        "FAULT": json.dumps(None if fault is None else asdict(fault)),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tightfit", "train", str(path), *words],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
    )
    failed = notes / "failed"
    seconds = time.time() - float(failed.read_text()) if failed.exists() else None
    failed.unlink(missing_ok=True)
    processes = [int(note.name.split()[1]) for note in notes.glob("process *")]
    left_behind = [number for number in processes if _is_running(number)]
    return Ended(ended.returncode, ended.stdout, ended.stderr, seconds, left_behind)


def run_each(folder: Path, jobs: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Start one rank of each job, as a launcher that gives each its own; codes and stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank, job in enumerate(jobs):
        path = folder / f"rank{rank}.yaml"
        path.write_text(yaml.safe_dump(job))
        own = {"RANK": rank, "WORLD_SIZE": len(jobs), "LOCAL_RANK": rank, "MASTER_PORT": port}
        environment = {name: str(value) for name, value in own.items()} | {
            "MASTER_ADDR": "127.0.0.1",
            "LOCAL_WORLD_SIZE": str(len(jobs)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tightfit", "train", str(path)],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=HANGS_SECONDS)[1] for process in processes]
    return [(process.returncode, each) for process, each in zip(processes, said, strict=True)]


def losses(output_dir: Path) -> dict[int, float]:
    """By step; of those that were done twice the last time."""
    lines = (output_dir / "trainer_log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {each["step"]: each["loss"] for each in records if each["event"] == "step"}


def named(fault: Fault) -> str:
    """How a message about the fault begins."""
    return f"error: rank {fault.rank} ({socket.gethostname()}, process "


def _is_running(process: int) -> bool:
    """Whether it is there, and no zombie that nobody has waited for."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
