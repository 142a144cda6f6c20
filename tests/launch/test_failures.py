"""Which of several failures is the cause, and how an exception becomes one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tightfit.errors import (
    ConfigError,
    DoesNotFitError,
    Interrupted,
    OtherRankError,
    TrainingError,
)
from tightfit.launch.failures import Cause, Failure, failure_of, first_cause

# As torch puts what NCCL gives it.
REMOTE = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
)
DUPLICATE = (
    "NCCL error in: NCCLUtils.cpp:77, invalid usage\nncclInvalidUsage: This usually reflects "
    "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both "
    "on CUDA device 27000"
)
FULL = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


def failure(rank: int, cause: Cause, seconds: float) -> Failure:
    return Failure(rank, "here", 1, "said", 1, cause, seconds)


@pytest.mark.parametrize(
    ("error", "cause", "code", "message"),
    [
        (ConfigError("wrong"), Cause.SAID, 2, "wrong"),
        (DoesNotFitError("too much", 7), Cause.SAID, 3, "too much"),
        (TrainingError("no number"), Cause.SAID, 1, "no number"),
        (OtherRankError("rank 0 failed: full"), Cause.TOLD, 1, "rank 0 failed: full"),
        (Interrupted("saved"), Cause.SAVED, 130, "saved"),
        (KeyboardInterrupt(), Cause.STOPPED, 130, "interrupted"),
        (dist.DistBackendError("NCCL error"), Cause.LOST_TOUCH, 1, "NCCL error"),
        (dist.DistBackendError(REMOTE), Cause.LOST_TOUCH, 1, "NCCL error in: NCCLUtils.cpp"),
        (dist.DistBackendError(DUPLICATE), Cause.FAULT, 1, "DistBackendError: NCCL error in"),
        (dist.DistBackendError(FULL), Cause.FAULT, 1, "DistBackendError: NCCL error in"),
        (RuntimeError("[pair.cc:1] Connection closed by peer"), Cause.LOST_TOUCH, 1, "[pair.cc"),
        (RuntimeError("shapes differ"), Cause.FAULT, 1, "RuntimeError: shapes differ\nthe trace"),
        (ValueError("Connection closed by peer"), Cause.FAULT, 1, "ValueError: Conn"),
    ],
)
def test_an_exception_as_a_failure(
    error: BaseException, cause: Cause, code: int, message: str
) -> None:
    found = failure_of(error, 3, "the trace\n")
    assert (found.cause, found.exit_code, found.rank) == (cause, code, 3)
    assert (found.host, found.process) == (socket.gethostname(), os.getpid())
    assert found.message.startswith(message)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, Cause.FAULT, 2.0), failure(1, Cause.SAID, 1.0)], 1),
        ([failure(0, Cause.LOST_TOUCH, 1.0), failure(1, Cause.DIED, 1.5)], 1),
        ([failure(0, Cause.LOST_TOUCH, 2.0), failure(1, Cause.LOST_TOUCH, 1.0)], 1),
        ([failure(0, Cause.SAID, 2.0), failure(1, Cause.TOLD, 1.0)], 0),
        ([failure(0, Cause.LOST_TOUCH, 1.0), failure(2, Cause.MACHINE, 11.0)], 2),
        ([failure(1, Cause.SAID, 1.0), failure(0, Cause.SAID, 1.0)], 0),
    ],
)
def test_the_cause_is_the_first_that_is_no_consequence(failures: list[Failure], rank: int) -> None:
    assert first_cause(failures).rank == rank


def test_it_is_read_back_as_it_was() -> None:
    written = failure(3, Cause.FAULT, 12.5)
    assert Failure.from_json(written.to_json()) == written


def test_torchrun_reads_it_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("errors") / "error.json"
    path.write_text(failure(3, Cause.SAID, 12.5).to_json())
    found = ProcessFailure(0, 1, 2, str(path))
    assert (found.message, found.timestamp) == ("said", 12)


@pytest.mark.parametrize("cause", Cause)
def test_the_rank_is_named_where_it_matters(cause: Cause) -> None:
    named = str(failure(3, cause, 0.0)).startswith("rank 3 (here, process 1): ")
    assert named == (cause not in (Cause.SAVED, Cause.STOPPED, Cause.MACHINE))


def test_without_room_for_the_reason_a_rank_says_it_itself(tmp_path: Path) -> None:
    """Its launcher shows what it has said last."""
    code = (
        "from tightfit.errors import TrainingError\n"
        "from tightfit.launch.failures import Reporting\n"
        f"with Reporting.of(1, {{'TORCHELASTIC_ERROR_FILE': {str(tmp_path / 'no' / 'file')!r}}}):\n"
        "    raise TrainingError('no number')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: rank 1 (")
    assert ended.stderr.endswith("): no number\n")
