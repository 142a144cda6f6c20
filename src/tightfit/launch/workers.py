"""The ranks of this machine as processes: started, watched, interrupted, ended.

Each is in a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone, which
passes it on once; and each holds the end of a pipe that closes when the supervisor is gone, so that
none outlives it. Of torch's elastic launcher the variables and the error file are used, not its
agent: that starts what is a mistake of the user again, ends ranks by a signal that means "save"
here, and waits half a minute for those that hang. Does not know why ranks fail.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tightfit.launch.environment import LIFELINE, RankPlace
from tightfit.launch.failures import ERROR_FILE, Cause, Failure, read_failure

_SECONDS_TO_DIE = 10  # after SIGKILL; one that hangs in a driver may take for ever
_LAST_LINES = 20  # of stderr, shown where a rank has not said why it died


@dataclass
class Worker:
    """One rank.

    Attributes:
        stderr: file of what it wrote there; None where that goes to the console.
        ended_by_us: it was killed because another one had failed.
    """

    place: RankPlace
    process: subprocess.Popen[bytes]
    error_file: Path
    stderr: Path | None
    ended_by_us: bool = False
    ended_seconds: float | None = None

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended_seconds is None:
            self.ended_seconds = time.time()
        return code

    def failure(self) -> Failure | None:
        """Why it ended; None while it runs, after success, and where it was ended from here."""
        code = self.poll()
        if code is None or code == 0:
            return None
        written = read_failure(self.error_file)
        if written is not None or self.ended_by_us:
            return written
        assert self.ended_seconds is not None
        return Failure(
            self.place.rank,
            socket.gethostname(),
            self.process.pid,
            self._how_it_died(code),
            1,
            Cause.DIED,
            self.ended_seconds,
        )

    def _how_it_died(self, code: int) -> str:
        if code < 0:
            said = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                said += " (by a person, or by the system when memory ran out)"
        else:
            said = f"ended with exit code {code}"
        lines = [] if self.stderr is None else _last_lines(self.stderr)
        return "\n".join([said, *(f"[rank {self.place.rank}] {line}" for line in lines)])


@dataclass
class Workers:
    """The ranks of this machine."""

    all: list[Worker] = field(default_factory=list)

    def running(self) -> bool:
        """Whether any of them is."""
        return bool(self.running_ranks())

    def running_ranks(self) -> list[int]:
        """Those that have not ended."""
        return [worker.place.rank for worker in self.all if worker.poll() is None]

    def failures(self) -> list[Failure]:
        """Of those that have failed by themselves so far."""
        return [failure for worker in self.all if (failure := worker.failure()) is not None]

    def interrupt(self) -> None:
        """Ask each to stop when its step is done."""
        for worker in self.all:
            if worker.poll() is None:
                worker.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Kill those that run and wait for them."""
        for worker in self.all:
            if worker.poll() is None:
                worker.ended_by_us = True
                worker.process.kill()
        until = time.monotonic() + _SECONDS_TO_DIE
        for worker in self.all:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue  # it hangs in the kernel; nobody can end it


@contextmanager
def start_workers(
    command: Sequence[str],
    places: Sequence[RankPlace],
    folder: Path,
    variables: Callable[[RankPlace], Mapping[str, str]],
) -> Iterator[Workers]:
    """Inside, a process runs for each place; at the end none does.

    Rank 0 writes to the console of this process. Of the others stdout is dropped, and stderr is
    kept for the case that they die.

    Args:
        folder: of their error files; new for every attempt.
        variables: of each rank's environment, over those of this process.
    """
    workers = Workers()
    reading, writing = os.pipe()
    try:
        for place in places:
            workers.all.append(_start(command, place, folder, variables(place), reading))
        yield workers
    finally:
        workers.end()
        os.close(reading)
        os.close(writing)


def _start(
    command: Sequence[str],
    place: RankPlace,
    folder: Path,
    variables: Mapping[str, str],
    lifeline: int,
) -> Worker:
    error_file = folder / f"rank{place.rank}.json"
    stderr = folder / f"rank{place.rank}.stderr" if place.rank else None
    own = {ERROR_FILE: str(error_file), LIFELINE: str(lifeline)}
    environment = {**os.environ, **variables, **rank_variables(place), **own}
    if stderr is None:
        process = subprocess.Popen(
            command, env=environment, pass_fds=[lifeline], start_new_session=True
        )
        return Worker(place, process, error_file, None)
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[lifeline],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    return Worker(place, process, error_file, stderr)


def rank_variables(place: RankPlace) -> dict[str, str]:
    """What torchrun would set, so that `place_here` and torch find it."""
    group_rank = place.rank // place.local_world_size
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(place.machines),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_USE_AGENT_STORE": str(place.joins_store),
    }


def _signal_name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


def _last_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
