"""Starts the ranks of this machine, watches them, and says in one message why one has failed.

One supervisor runs per machine. When a rank fails all are ended within seconds, and start again
while the job allows it. Does not know what ranks do.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tightfit.errors import (
    ConfigError,
    DoesNotFitError,
    InputError,
    Interrupted,
    RankError,
    TightfitError,
)
from tightfit.facts.job import Job
from tightfit.launch.environment import BEGIN, RankPlace
from tightfit.launch.failures import Cause, Failure, first_cause
from tightfit.launch.interrupts import Interrupts
from tightfit.launch.machines import SILENCE_SECONDS, Exchange, Machines
from tightfit.launch.processors import threads_variable
from tightfit.launch.restart import AS_THE_JOB_SAYS, begins_again
from tightfit.launch.workers import Workers, start_workers

_POLL_SECONDS = 0.05
# How long others may take to say the cause, when what was heard first is a consequence.
_SECONDS_TO_EXPLAIN = 3.0
_ENDS_ALL = (Cause.SAID, Cause.FAULT, Cause.DIED, Cause.MACHINE)
_BY_THE_USER = (Cause.SAVED, Cause.STOPPED)


def supervise(job: Job, command: Sequence[str], say: Callable[[str], None]) -> None:
    """Run `command` once for every rank of this machine, until all have ended well.

    Args:
        say: shows a person that ranks start again, and why.

    Raises:
        RankError: a rank has failed, and may not start again.
        Interrupted: the user has stopped the job, and it has saved.
        KeyboardInterrupt: the user has stopped it, and it has not.
    """
    with Interrupts() as interrupts:
        machines = Machines.meet(job, interrupts)
        attempt, begins = machines.first_attempt(), AS_THE_JOB_SAYS
        while True:
            begins = machines.begin(attempt, begins, interrupts)
            failure = _Attempt(job, machines, attempt, interrupts).run(command, begins)
            if failure is None:
                return
            if not _may_start_again(failure, job.max_restarts - attempt):
                raise _as_error(failure, machines.count)
            attempt += 1
            begins, said = _begins_again(job, failure)
            say(f"{failure}\nall ranks start again {said}; restart {attempt} of {job.max_restarts}")


def _notes_folder() -> tempfile.TemporaryDirectory[str]:
    """Where ranks leave the reason of their end.

    Raises:
        ConfigError: there is no folder for temporary files.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="tightfit-ranks-")
    except OSError as error:
        raise ConfigError(
            f"no folder for temporary files: {error}; set TMPDIR to one that can be written to"
        ) from None


@dataclass
class _Attempt:
    """All ranks of this machine, from their start to the end of the last one."""

    job: Job
    machines: Machines
    attempt: int
    interrupts: Interrupts
    _passed_on: bool = False
    _heard_seconds: float | None = None

    def run(self, command: Sequence[str], begins: str) -> Failure | None:
        """None where all ended well."""
        with (
            _notes_folder() as folder,
            Exchange(self.machines, self.attempt) as exchange,
            start_workers(
                command, self._places(), Path(folder), partial(self._variables, begins)
            ) as workers,
        ):
            while not self._is_over(workers, exchange):
                time.sleep(_POLL_SECONDS)
            silent = workers.running_ranks()
            workers.end()
            failures = workers.failures() + exchange.failures()
            if self.interrupts.count > 1:
                failures = [_stopped()]
            if not failures:
                return None
            cause = _with_suspects(first_cause(failures), silent)
            exchange.publish(cause)
            return cause

    def _is_over(self, workers: Workers, exchange: Exchange) -> bool:
        """Whether all have ended, or one has failed and no other one can say why any more."""
        if self.interrupts.count > 1:
            return True
        if self.interrupts.count and not self._passed_on:
            workers.interrupt()
            self._passed_on = True
        elsewhere = exchange.failures()
        failures = workers.failures() + elsewhere
        over_there = any(failure.cause is not Cause.SAVED for failure in elsewhere)
        if over_there or any(failure.cause in _ENDS_ALL for failure in failures):
            return True
        if any(failure.cause is not Cause.SAVED for failure in failures):
            nobody_left = self.machines.count == 1 and not workers.running()
            return nobody_left or self._has_waited()
        return not workers.running() and (bool(failures) or exchange.done())

    def _has_waited(self) -> bool:
        """Whether what was heard first has been explained by nobody for long enough."""
        now = time.monotonic()
        self._heard_seconds = self._heard_seconds or now
        several = self.machines.count > 1
        patience = _SECONDS_TO_EXPLAIN + (SILENCE_SECONDS if several else 0)
        return now - self._heard_seconds > patience

    def _places(self) -> list[RankPlace]:
        each = self.job.num_gpus
        return [
            RankPlace(
                rank=self.machines.here * each + local_rank,
                world_size=self.job.ranks,
                local_rank=local_rank,
                local_world_size=each,
                master_address=self.machines.address,
                master_port=self.machines.port,
                attempt=self.attempt,
                joins_store=True,
            )
            for local_rank in range(each)
        ]

    @staticmethod
    def _variables(begins: str, place: RankPlace) -> dict[str, str]:
        return {BEGIN: begins, **threads_variable(place)}


def _with_suspects(cause: Failure, silent: list[int]) -> Failure:
    """Where ranks waited for others in vain, those that have said nothing may be the reason."""
    if cause.cause is not Cause.LOST_TOUCH or not silent:
        return cause
    named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
    return replace(cause, message=f"{cause.message}; still running and silent: {named}")


def _may_start_again(failure: Failure, restarts_left: int) -> bool:
    """A mistake of the user would be one again, and what the user has stopped stays so."""
    return restarts_left > 0 and failure.exit_code == 1 and failure.cause not in _BY_THE_USER


def _begins_again(job: Job, failure: Failure) -> tuple[str, str]:
    try:
        return begins_again(job)
    except ConfigError as error:
        said = f"{failure}\nthe ranks cannot start again: {error}"
        raise RankError(said, failure.exit_code) from None


def _stopped() -> Failure:
    return Failure(0, "", os.getpid(), "interrupted", 130, Cause.STOPPED, time.time())


def _as_error(failure: Failure, machines: int) -> TightfitError | KeyboardInterrupt:
    """What is wrong with the job itself is all ranks' on one machine, whichever has said it."""
    if failure.cause is Cause.STOPPED:
        return KeyboardInterrupt()
    if failure.cause is Cause.SAVED:
        return Interrupted(str(failure))
    of_all = machines == 1 and failure.exit_code in (
        InputError.exit_code,
        DoesNotFitError.exit_code,
    )
    said = failure.message if of_all and failure.cause is Cause.SAID else str(failure)
    return RankError(said, failure.exit_code)
