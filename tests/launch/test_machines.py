"""Two supervisors on this host, as on two machines: what each of them hears of the other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tightfit.errors import ConfigError, RankError
from tightfit.facts.job import Job
from tightfit.launch import machines
from tightfit.launch.interrupts import Interrupts
from tightfit.launch.machines import Machines
from tightfit.launch.supervisor import supervise

MakeJob = Callable[..., Job]
Script = Callable[..., list[str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def two() -> dict[str, object]:
    """Keys of two machines with a rank each, at a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"nnodes": 2, "num_gpus": 1, "master_addr": "127.0.0.1", "master_port": port}


def test_ranks_of_both_join(
    job: MakeJob, script: Script, supervisor: Start, two: dict[str, object], tmp_path: Path
) -> None:
    command = script("note(f'rank{place.rank}', (place.local_rank, add_up()))", joins=True)
    other = supervisor(command, **two, node_rank=1)
    supervise(job(**two), command, print)
    assert other.communicate() == ("", "")
    assert other.returncode == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["(0, 2)"] * 2


def test_both_say_which_rank_failed(
    job: MakeJob, script: Script, supervisor: Start, two: dict[str, object]
) -> None:
    command = script("if place.rank == 1: raise ConfigError('a mistake')\nwait_for_the_end()")
    other = supervisor(command, **two, node_rank=1)
    with pytest.raises(RankError, match=r"^rank 1 .*: a mistake$") as caught:
        supervise(job(**two), command, print)
    assert caught.value.exit_code == 2
    _, said = other.communicate()
    assert (said, other.returncode) == (f"{caught.value}\n", 2)


@pytest.mark.slow
def test_both_start_again(
    job: MakeJob, script: Script, supervisor: Start, two: dict[str, object], tmp_path: Path
) -> None:
    act = """
    if place.attempt == 0:
        if place.rank == 0: os.kill(os.getpid(), signal.SIGKILL)
        wait_for_the_end()
    note(f"rank{place.rank}", f"{place.attempt} {os.environ[BEGIN]}")
    """
    command = script(act)
    other = supervisor(command, **two, node_rank=1, max_restarts=1)
    said: list[str] = []
    supervise(job(**two, max_restarts=1), command, said.append)
    told, _ = other.communicate()
    assert other.returncode == 0
    assert told.strip() == said[0]
    assert "rank 0" in told
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["1 afresh"] * 2


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_missed_and_may_come_back(
    job: MakeJob,
    script: Script,
    supervisor: Start,
    two: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other supervisor is stopped, as if its cable were cut, and another one comes for it."""
    monkeypatch.setattr(machines, "SILENCE_SECONDS", 2.0)
    os.mkfifo(tmp_path / "started")
    act = """
    if place.attempt == 0:
        if place.rank == 1: tell("started")
        wait_for_the_end()
    note(f"rank{place.rank}", place.attempt)
    """
    command = script(act)
    lost = supervisor(command, **two, node_rank=1)
    came_back = []

    def say(text: str) -> None:
        assert "machine 1 (rank 1) has not answered for 2 s" in text
        came_back.append(supervisor(command, **two, node_rank=1, max_restarts=1))

    cutter = subprocess.Popen(
        ["sh", "-c", f"cat {tmp_path}/started > /dev/null && kill -STOP {lost.pid}"]
    )
    try:
        supervise(job(**two, max_restarts=1), command, say)
    finally:
        cutter.wait()
        lost.kill()
        lost.communicate()
    came_back[0].communicate()
    assert came_back[0].returncode == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_without_machine_0_the_others_end(
    script: Script, supervisor: Start, two: dict[str, object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "started")
    command = script("if place.rank == 1: tell('started')\nwait_for_the_end()")
    first, other = (supervisor(command, **two, node_rank=number) for number in (0, 1))
    (tmp_path / "started").read_text()
    first.send_signal(signal.SIGKILL)
    _, said = other.communicate()
    assert other.returncode == 1
    assert said.splitlines()[-1] == "machine 0 (rank 0) is gone"
    first.communicate()


@pytest.mark.slow
def test_machine_0_that_goes_before_the_next_attempt_is_named(
    job: MakeJob, supervisor: Start, script: Script, two: dict[str, object], tmp_path: Path
) -> None:
    """Machine 0 may not restart, and this one would."""
    save = tmp_path / "run" / "checkpoint-3"
    save.mkdir(parents=True)
    command = script("if place.rank == 0: os._exit(1)\nwait_for_the_end()")
    first = supervisor(command, **two, max_restarts=1)
    elsewhere = str(tmp_path / "elsewhere")
    keys = {**two, "node_rank": 1, "max_restarts": 1, "output_dir": elsewhere, "ddp_timeout": 20}
    with pytest.raises(RankError, match="machine 0 is gone"):
        supervise(job(**keys), command, print)
    _, said = first.communicate()
    assert "checkpoint-3 cannot be resumed" in said


def test_machines_that_do_not_come_are_named(job: MakeJob, two: dict[str, object]) -> None:
    with Interrupts() as interrupts:
        met = Machines.meet(job(**{**two, "nnodes": 3}, ddp_timeout=1), interrupts)
        with pytest.raises(RankError, match=r"of 3 machines number 1, 2 did not come within 1 s"):
            met.begin(0, "", interrupts)


def test_machine_0_that_is_not_there_is_named(job: MakeJob, two: dict[str, object]) -> None:
    with pytest.raises(RankError, match=r"127.0.0.1:\d+ does not answer; is machine 0 started"):
        Machines.meet(job(**two, node_rank=1, ddp_timeout=1), Interrupts())


def test_a_machine_0_that_is_cut_off_is_waited_for_in_silence(
    job: MakeJob, two: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    """As behind a cable that is cut, nothing is refused: a try has no answer."""
    with socket.socket() as deaf, ExitStack() as waiting:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        for _ in range(2):  # they are the queue, which has no room for more
            first = waiting.enter_context(socket.socket())
            first.setblocking(False)
            first.connect_ex(("127.0.0.1", port))
        keys = {**two, "master_port": port, "node_rank": 1, "ddp_timeout": 1}
        with pytest.raises(RankError, match=rf"{port} does not answer.*timed out"):
            Machines.meet(job(**keys), Interrupts())
    assert capfd.readouterr() == ("", "")


def test_waiting_for_machine_0_can_be_stopped(job: MakeJob, two: dict[str, object]) -> None:
    interrupts = Interrupts()
    interrupts.count = 1
    with pytest.raises(KeyboardInterrupt):
        Machines.meet(job(**two, node_rank=1), interrupts)


def test_a_port_that_is_taken_is_named(job: MakeJob, two: dict[str, object]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RankError, match=f"127.0.0.1:{port} is taken"):
            Machines.meet(job(**{**two, "master_port": port}), Interrupts())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("no-such-host.invalid", "no-such-host.invalid is unknown"),
        ("192.0.2.1", r"this machine is not reached at 192.0.2.1 \("),  # of documents, nobody's
    ],
)
def test_machine_0_that_is_elsewhere_is_told_at_once(
    job: MakeJob,
    two: dict[str, object],
    address: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machines, "_REACHED_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=f"^master_addr: {said}.*address of this machine"):
        Machines.meet(job(**{**two, "master_addr": address}), Interrupts())
    assert capfd.readouterr() == ("", "")


def test_a_consequence_waits_for_the_cause_on_another_machine(
    job: MakeJob, script: Script, supervisor: Start, two: dict[str, object], tmp_path: Path
) -> None:
    """All ranks here have ended by losing touch before the other machine says why."""
    os.mkfifo(tmp_path / "gone")
    act = """
    if place.rank == 1:
        wait_for("gone")
        raise TrainingError("the first cause")
    tell("gone")
    raise RuntimeError("gloo: Connection closed by peer")
    """
    command = script(act, joins=True)
    other = supervisor(command, **two, node_rank=1)
    with pytest.raises(RankError, match=r"^rank 1 .*: the first cause$"):
        supervise(job(**two), command, print)
    other.communicate()


def test_several_machines_need_an_address(job: MakeJob) -> None:
    with pytest.raises(ConfigError, match="nnodes: 2 needs master_addr"):
        Machines.meet(job(nnodes=2), Interrupts())
