"""Supervisors with real ranks: that they join, and what is said when one of them fails."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tightfit.errors import ConfigError, Interrupted, RankError
from tightfit.facts.job import Job
from tightfit.launch.supervisor import supervise
from tightfit.training.checkpoint import Progress

MakeJob = Callable[..., Job]
Script = Callable[..., list[str]]
Start = Callable[..., "subprocess.Popen[str]"]


def run(job: Job, command: list[str]) -> list[str]:
    """What was said meanwhile."""
    said: list[str] = []
    supervise(job, command, said.append)
    return said


def test_ranks_join_and_take_what_rank_0_has(job: MakeJob, script: Script, tmp_path: Path) -> None:
    act = """
    value = from_first({"plan": 7} if place.rank == 0 else None)
    note(f"rank{place.rank}", (place.local_rank, place.world_size, add_up(), value["plan"]))
    """
    assert run(job(num_gpus=3), script(act, joins=True)) == []
    notes = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
    assert notes == [f"({rank}, 3, 3, 7)" for rank in range(3)]


def test_only_rank_0_is_on_the_console(
    job: MakeJob, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    act = "print('out of', place.rank); print('err of', place.rank, file=sys.stderr)"
    run(job(), script(act))
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out of 0\n", "err of 0\n")


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise TrainingError('the loss is gone')", 1, "the loss is gone"),
        ("raise ZeroDivisionError('seven')", 1, "ZeroDivisionError: seven"),
        ("os._exit(7)", 1, "ended with exit code 7"),
        ("print('last words', file=sys.stderr, flush=True); os._exit(7)", 1, "[rank 1] last words"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, "was killed by SIGSEGV"),
    ],
)
def test_one_message_says_which_rank_failed_and_why(
    job: MakeJob,
    script: Script,
    capfd: pytest.CaptureFixture[str],
    what: str,
    code: int,
    said: str,
) -> None:
    command = script(f"if place.rank == 1: {what}\nwait_for_the_end()")
    with pytest.raises(RankError) as caught:
        run(job(), command)
    message = str(caught.value)
    assert message.startswith(f"rank 1 ({socket.gethostname()}, process ")
    assert said in message
    assert caught.value.exit_code == code
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_a_rank_that_fails_before_it_joins_keeps_nobody_waiting(
    job: MakeJob, script: Script
) -> None:
    before = "if place.rank == 0: raise ConfigError('nothing fits')"
    with pytest.raises(RankError, match=r"^nothing fits$") as caught:
        run(job(), script("add_up()", before, joins=True))
    assert caught.value.exit_code == 2, "of the job itself: whichever rank has said it"


def test_the_cause_is_told_although_a_consequence_ends_first(
    job: MakeJob, script: Script, tmp_path: Path
) -> None:
    """Rank 1 fails and lingers; rank 0 loses touch with it and ends before it."""
    os.mkfifo(tmp_path / "gone")
    act = """
    if place.rank == 1:
        error = TrainingError("the first cause")
        dist.destroy_process_group()
        wait_for("gone")
        raise error
    try:
        while True:
            add_up()
    finally:
        if place.rank == 0:
            tell("gone")
    """
    with pytest.raises(RankError, match=r"rank 1.*the first cause"):
        run(job(), script(act, joins=True))


def test_what_every_rank_lost_is_told_as_that(job: MakeJob, script: Script) -> None:
    act = "raise RuntimeError('gloo: Connection closed by peer [1.2.3.4]')"
    with pytest.raises(RankError, match=r"rank [01] .*lost touch with another rank: gloo"):
        run(job(), script(act, joins=True))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_when_others_have_waited_in_vain(
    job: MakeJob, script: Script
) -> None:
    act = """
    if place.rank == 1: wait_for_the_end()
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    """
    with pytest.raises(RankError, match=r"rank 0 .*Timed out .*; still running and silent: rank 1"):
        run(job(), script(act, joins=True))


def test_ranks_that_differ_are_told_apart(job: MakeJob, script: Script) -> None:
    frame = "facts = {'torch': f'2.{place.rank // 2}', 'seed': '42', 'python': '3'}"
    with pytest.raises(RankError) as caught:
        run(job(num_gpus=3), script("add_up()", frame=frame, joins=True))
    assert "torch: 2.0 on ranks 0-1, 2.1 on rank 2" in str(caught.value)
    assert "seed" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_rank_that_does_not_come_is_named_in_time(
    job: MakeJob, script: Script, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "never")
    before = "if place.rank == 1: wait_for('never')"
    command = script("add_up()", before, frame="timeout_seconds = 1.0", joins=True)
    with pytest.raises(RankError, match=r"missing: rank 1 within 1 s \(ddp_timeout\)"):
        run(job(), command)


# Restarts


def test_after_a_kill_all_start_again(job: MakeJob, script: Script, tmp_path: Path) -> None:
    act = """
    add_up()
    if place.attempt == 0 and place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add_up()
    note(f"rank{place.rank}", f"{place.attempt} {os.environ[BEGIN]}")
    """
    said = run(job(max_restarts=2), script(act, joins=True))
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["1 afresh"] * 2
    assert len(said) == 1
    assert "rank 1" in said[0]
    assert "was killed by SIGKILL" in said[0]
    assert "start again from the start (nothing was saved yet); restart 1 of 2" in said[0]


def save(folder: Path, step: int, *, with_optimizer: bool = True) -> None:
    """What a checkpoint needs for others to know how far it has come."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    progress = Progress(step, 0, step, 2, 10, 42)
    (checkpoint / "trainer_state.json").write_text(json.dumps(asdict(progress)))
    if with_optimizer:
        (checkpoint / "optimizer.safetensors").touch()


KILLED_ONCE = """
if place.attempt == 0 and place.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
note(f"rank{place.rank}", os.environ[BEGIN])
"""


def test_they_resume_what_was_saved(job: MakeJob, script: Script, tmp_path: Path) -> None:
    save(tmp_path / "run", 20)
    said = run(job(max_restarts=1), script(KILLED_ONCE))
    assert (tmp_path / "rank0").read_text() == "resume"
    assert f"from {tmp_path / 'run' / 'checkpoint-20'}" in said[0]


def test_what_cannot_be_resumed_is_not_deleted(
    job: MakeJob, script: Script, tmp_path: Path
) -> None:
    save(tmp_path / "run", 20, with_optimizer=False)
    with pytest.raises(RankError, match=r"(?s)SIGKILL.*checkpoint-20 cannot be resumed"):
        run(job(max_restarts=1), script(KILLED_ONCE))
    assert (tmp_path / "run" / "checkpoint-20").exists()


def test_restarts_come_to_an_end(job: MakeJob, script: Script) -> None:
    act = "if place.rank == 1: raise ZeroDivisionError\nwait_for_the_end()"
    said: list[str] = []
    with pytest.raises(RankError, match="ZeroDivisionError"):
        supervise(job(max_restarts=1), script(act), said.append)
    assert len(said) == 1


def test_mistakes_are_not_tried_again(job: MakeJob, script: Script) -> None:
    said: list[str] = []
    with pytest.raises(RankError, match="a mistake"):
        supervise(job(max_restarts=3), script("raise ConfigError('a mistake')"), said.append)
    assert said == []


def test_nor_is_what_the_user_has_stopped(job: MakeJob, script: Script) -> None:
    said: list[str] = []
    with pytest.raises(Interrupted, match=r"^stopped after step 3$"):
        supervise(
            job(max_restarts=3), script("raise Interrupted('stopped after step 3')"), said.append
        )
    assert said == []


# Signals: the ranks send them to their parent, the supervisor, which is this process.

# Ranks that stop together one step after the signal, as those of training do.
STOPS = """
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
add_up()
if place.rank == 0:
    os.kill(os.getppid(), getattr(signal, os.environ["SENDS"]))
while True:
    stop = torch.tensor(len(asked))
    dist.all_reduce(stop)
    if stop:
        note(f"saved{place.rank}", len(asked))
        raise Interrupted("saved")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_is_passed_on_once(
    job: MakeJob, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SENDS", name)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"^saved$"):
        run(job(max_restarts=1), script(STOPS, joins=True))
    assert {(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)} <= {"0", "1"}
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_signal_ends_them(job: MakeJob, script: Script, tmp_path: Path) -> None:
    act = """
    def ask(*_):
        if place.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
    signal.signal(signal.SIGINT, ask)
    note(f"rank{place.rank}", os.getpid())
    if place.rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    wait_for_the_end()
    """
    with pytest.raises(KeyboardInterrupt):
        run(job(), script(act))
    assert not _is_running(int((tmp_path / "rank0").read_text()))


def test_before_there_is_a_step_to_finish_one_signal_is_enough(
    job: MakeJob, script: Script
) -> None:
    """Rank 0 is at its plan; the other one waits for it in a call that no signal reaches."""
    before = """
    if place.rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        wait_for_the_end()
    """
    with pytest.raises(KeyboardInterrupt):
        run(job(), script("add_up()", before, joins=True))


def test_ranks_do_not_outlive_their_supervisor(
    supervisor: Start, script: Script, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "started")
    act = """
    if place.rank == 0:
        tell("started", os.getpid())
    wait_for_the_end()
    """
    process = supervisor(script(act))
    rank_0 = os.pidfd_open(int((tmp_path / "started").read_text()))
    process.kill()
    ended, _, _ = select.select([rank_0], [], [], 60)
    os.close(rank_0)
    assert ended


def _is_running(process: int) -> bool:
    """Whether it is there, and no zombie that nobody has waited for."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_without_a_temporary_folder_it_says_what_to_set(
    job: MakeJob, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no folder for temporary files: .*gone.*set TMPDIR"):
        supervise(job(), script("pass"), print)
