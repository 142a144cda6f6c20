"""The supervisors of several machines: they wait for each other, and tell each other why it ended.

Machine 0 keeps a store (torch's), which its ranks meet at too. While ranks run, a thread writes a
beat into it and reads those of the others: a machine that is cut off closes no connection, and is
known by its silence. Does not know how ranks are started.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from tightfit.errors import ConfigError, RankError
from tightfit.facts.job import Job
from tightfit.launch.failures import Cause, Failure
from tightfit.launch.interrupts import Interrupts

SILENCE_SECONDS = 10.0  # after which a machine is taken for lost
_BEAT_SECONDS = 0.5
_POLL_SECONDS = 0.05
_ONE_TRY = timedelta(seconds=1)
_REACHED_SECONDS = 5.0  # within which a machine reaches itself
_DEFAULT_PORT = 29500
_CURRENT = "attempt"


@dataclass
class Machines:
    """All machines of a job, as one of them sees them.

    Attributes:
        here: number of this machine.
        address, port: of the store.
        ranks_each: ranks of a machine.
        timeout_seconds: how long machines wait for each other before ranks are started.
        cut_off: machine 0 was silent; a call may hang in the old connection to it.
    """

    here: int
    count: int
    address: str
    port: int
    ranks_each: int
    timeout_seconds: float
    store: Store
    cut_off: bool = False

    @classmethod
    def meet(cls, job: Job, interrupts: Interrupts) -> Machines:
        """Keep the store, or join that of machine 0.

        Raises:
            ConfigError: nobody has said where machine 0 is, or machine 0 is not there.
            RankError: it cannot be reached in time, or its port is taken.
            KeyboardInterrupt: the user did not want to wait any longer.
        """
        if job.nnodes > 1 and job.master_addr is None:
            raise ConfigError(
                f"nnodes: {job.nnodes} needs master_addr: the name or address of machine 0"
            )
        address = job.master_addr or "127.0.0.1"
        default = _DEFAULT_PORT if job.nnodes > 1 else 0  # 0: any that is free
        port = job.master_port or default
        if job.node_rank == 0:
            store = _keep_store(address, port, job.ddp_timeout)
        else:
            store = _join_store(address, port, job.ddp_timeout, interrupts)
        return cls(
            job.node_rank, job.nnodes, address, store.port, job.num_gpus, job.ddp_timeout, store
        )

    def first_attempt(self) -> int:
        """0; where this machine comes back to a job, the attempt that waits for it."""
        if self.here == 0 or not self.store.check([_CURRENT]):
            return 0
        current = int(self.store.get(_CURRENT))
        was_there: bool = self.store.check([self.key(current, "host", self.here)])
        return current + int(was_there)

    def begin(self, attempt: int, begins: str, interrupts: Interrupts) -> str:
        """Wait until all machines are here; what machine 0 has said that ranks begin from.

        Raises:
            RankError: some did not come in time.
            KeyboardInterrupt: the user did not want to wait any longer.
        """
        if self.count == 1:
            return begins
        if self.cut_off:
            self.store = _join_store(self.address, self.port, self.timeout_seconds, interrupts)
            self.cut_off = False
        try:
            return self._begin(attempt, begins, interrupts)
        except dist.DistError as error:
            raise RankError(f"machine 0 is gone ({_first_line(error)})") from None

    def _begin(self, attempt: int, begins: str, interrupts: Interrupts) -> str:
        names = [self.key(attempt, "host", machine) for machine in range(self.count)]
        if self.here == 0:
            self.store.set(self.key(attempt, "begins"), begins)
            self.store.set(_CURRENT, str(attempt))
        self.store.set(names[self.here], socket.gethostname())
        until = time.monotonic() + self.timeout_seconds
        while not self.store.check(names):
            if interrupts.count:
                raise KeyboardInterrupt
            if time.monotonic() > until:
                missing = [str(m) for m, name in enumerate(names) if not self.store.check([name])]
                raise RankError(
                    f"of {self.count} machines number {', '.join(missing)} did not come within "
                    f"{self.timeout_seconds} s (ddp_timeout)"
                )
            time.sleep(_POLL_SECONDS)
        return str(self.store.get(self.key(attempt, "begins")), "utf-8")

    def key(self, attempt: int, name: str, machine: int | str = "") -> str:
        """The name in the store of something that a machine says in an attempt."""
        return f"machines/{attempt}/{name}{machine}"


@dataclass
class Exchange:
    """What machines tell each other while the ranks of one attempt run; nothing where there is
    one.

    Inside, a thread does it, so that a connection that hangs stops nobody.
    """

    machines: Machines
    attempt: int
    _failure: Failure | None = None  # of another machine
    _own: Failure | None = None  # to be published
    _done: bool = False
    _all_done: bool = False
    _gone: bool = False  # machine 0 has closed its store
    _leaving: threading.Event = field(default_factory=threading.Event)
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _answered: float = field(default_factory=time.monotonic)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.machines.count > 1:
            self._thread = threading.Thread(target=self._talk, daemon=True, name="machines")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the others know; machine 0, which keeps the store, until all of them do."""
        self._leaving.set()
        hangs = self._thread is not None and self._thread.is_alive() and not self._gone
        if hangs and self.machines.here != 0 and self._silent():
            self.machines.cut_off = True
        elif self._thread is not None:
            self._thread.join(SILENCE_SECONDS)

    def failures(self) -> list[Failure]:
        """Why another machine's ranks have ended, or that it does not answer; else nothing."""
        if self._failure is not None or self._thread is None:
            return [] if self._failure is None else [self._failure]
        if self._gone:
            return [self._lost(0, "is gone")]
        silent = self._silent()[:1]
        return [self._lost(m, f"has not answered for {SILENCE_SECONDS:.0f} s") for m in silent]

    def publish(self, failure: Failure) -> None:
        """Tell the others why it has ended here, unless they have said so first."""
        self._own = failure

    def done(self) -> bool:
        """Say that all ranks of this machine have ended well; whether those of all have."""
        self._done = True
        return self._all_done or self._thread is None

    def _silent(self) -> list[int]:
        """Machines that have not answered for long: for machine 0 the others, for them machine
        0."""
        now = time.monotonic()
        if now - self._answered > SILENCE_SECONDS and self.machines.here != 0:
            return [0]
        return [m for m, (_, since) in self._heard.items() if now - since > SILENCE_SECONDS]

    def _lost(self, machine: int, how: str) -> Failure:
        each = self.machines.ranks_each
        first, last = machine * each, (machine + 1) * each - 1
        whose = f"rank {first}" if each == 1 else f"ranks {first}-{last}"
        said = f"machine {machine} ({whose}) {how}"
        return Failure(first, "", 0, said, 1, Cause.MACHINE, time.time())

    def _talk(self) -> None:
        beat = 0
        try:
            while not self._leaving.is_set():
                self._round(beat)
                beat += 1
                self._leaving.wait(_BEAT_SECONDS)
            self._leave()
        except dist.DistError:
            self._gone = True

    def _round(self, beat: int) -> None:
        store, key, attempt = self.machines.store, self.machines.key, self.attempt
        store.set(key(attempt, "beat", self.machines.here), str(beat))
        if self._own is None and store.check([key(attempt, "failure")]):
            self._failure = Failure.from_json(store.get(key(attempt, "failure")))
        everybody = range(self.machines.count)
        for machine in everybody if self.machines.here == 0 else ():
            name = key(attempt, "beat", machine)
            heard = store.get(name) if store.check([name]) else b""
            if machine not in self._heard or self._heard[machine][0] != heard:
                self._heard[machine] = heard, time.monotonic()
        if self._done:
            store.set(key(attempt, "done", self.machines.here), "")
            self._all_done = store.check([key(attempt, "done", m) for m in everybody])
        self._answered = time.monotonic()

    def _leave(self) -> None:
        store, key, attempt = self.machines.store, self.machines.key, self.attempt
        if self._own is not None:
            store.compare_set(key(attempt, "failure"), "", self._own.to_json())
        store.set(key(attempt, "left", self.machines.here), "")
        if self.machines.here != 0:
            return
        silent = self._silent()
        names = [key(attempt, "left", m) for m in range(self.machines.count) if m not in silent]
        until = time.monotonic() + SILENCE_SECONDS
        while not store.check(names) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


def _keep_store(address: str, port: int, timeout_seconds: float) -> TCPStore:
    _check_own_address(address, port)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise RankError(f"{address}:{port} is taken ({_first_line(error)})") from None


def _check_own_address(address: str, port: int) -> None:
    """See that what listens here is reached there; torch's store waits for it as long as for ranks
    and prints frames of C++.

    Raises:
        ConfigError: nobody knows the address, or it is not this machine's.
        RankError: somebody else listens.
    """
    asked = "give the name or address of this machine, on which node_rank is 0"
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise ConfigError(f"master_addr: {address} is unknown ({error}); {asked}") from None
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise RankError(f"{address}:{port} is taken ({error}); give another master_port") from None
    with server:
        place = (address, server.getsockname()[1])
        try:
            socket.create_connection(place, _REACHED_SECONDS).close()
        except OSError as error:
            raise ConfigError(
                f"master_addr: this machine is not reached at {address} ({error}); {asked}"
            ) from None


def _join_store(
    address: str, port: int, timeout_seconds: float, interrupts: Interrupts
) -> TCPStore:
    """In short tries, since no signal reaches one."""
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            # torch's own tries print frames of C++ where nobody answers.
            socket.create_connection((address, port), _ONE_TRY.total_seconds()).close()
            store = TCPStore(
                address, port, is_master=False, timeout=_ONE_TRY, wait_for_workers=False
            )
        except (OSError, dist.DistError) as error:
            if interrupts.count:
                raise KeyboardInterrupt from None
            if time.monotonic() > until:
                raise RankError(
                    f"{address}:{port} does not answer; is machine 0 started? "
                    f"({_first_line(error)})"
                ) from None
            time.sleep(_POLL_SECONDS)
            continue
        store.set_timeout(timedelta(seconds=timeout_seconds))
        return store


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
