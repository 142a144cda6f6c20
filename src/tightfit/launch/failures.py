"""Why a rank failed, as a file that its launcher reads; and which of several failures is the cause.

The file is that of torch's elastic launcher (`TORCHELASTIC_ERROR_FILE`), so that torchrun shows the
same message. When one rank fails the others lose touch with it: what they say then is a
consequence. Imports no torch: a rank that cannot import it says so too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType

from tightfit.errors import Interrupted, OtherRankError, TightfitError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_FAILED, _INTERRUPTED = 1, 130
# What gloo says when a rank at the other end is gone; torch has no type of its own for it.
_LOST_TOUCH = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")
# What torch says of NCCL where nobody else is to blame: two ranks on one card, a full card.
_OWN_FAULTS = ("ncclInvalidUsage", "ncclInvalidArgument", "out of memory")


class Cause(StrEnum):
    """What kind of end it was.

    Attributes:
        SAID: an error of tightfit, whose text is for the user.
        FAULT: any other exception.
        LOST_TOUCH: another rank is gone or did not answer.
        TOLD: another rank has failed, and has told this one.
        SAVED: the user stopped it, and it has saved.
        STOPPED: the user stopped it before there was anything to save.
        DIED: it has not said why.
        MACHINE: its whole machine does not answer.
    """

    SAID = "said"
    FAULT = "fault"
    LOST_TOUCH = "lost touch"
    TOLD = "told"
    SAVED = "saved"
    STOPPED = "stopped"
    DIED = "died"
    MACHINE = "machine"


_CONSEQUENCES = (Cause.LOST_TOUCH, Cause.TOLD)


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    Attributes:
        message: for the user; of a fault with its traceback.
        host, process: where it ran.
        seconds: since 1970, when it happened or was seen.
    """

    rank: int
    host: str
    process: int
    message: str
    exit_code: int
    cause: Cause
    seconds: float

    def __str__(self) -> str:
        """One message, with the rank in front where it matters which one it was."""
        if self.cause in (Cause.SAVED, Cause.STOPPED, Cause.MACHINE):
            return self.message
        lost = "lost touch with another rank: " if self.cause is Cause.LOST_TOUCH else ""
        return f"rank {self.rank} ({self.host}, process {self.process}): {lost}{self.message}"

    def to_json(self) -> str:
        """Text for `from_json`, and for torchrun."""
        return json.dumps({**asdict(self), "timestamp": self.seconds})

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """What `to_json` gave."""
        content = json.loads(text)
        del content["timestamp"]
        return cls(**{**content, "cause": Cause(content["cause"])})


@dataclass(frozen=True)
class Reporting:
    """Inside, whatever is raised ends this rank, after the reason was told: to the launcher, where
    it has named a file, which then shows one message for all ranks; else on stderr.

    The process ends at once: libraries whose other ranks are gone may wait for them at their end.
    """

    rank: int
    error_file: Path | None

    @classmethod
    def of(cls, rank: int, environment: Mapping[str, str]) -> Reporting:
        """As the launcher has asked for."""
        named = environment.get(ERROR_FILE)
        return cls(rank, Path(named) if named else None)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        failure = failure_of(error, self.rank, "".join(traceback.format_exception(error)))
        if self.error_file is None or not _written_whole(self.error_file, failure.to_json()):
            print(f"error: {failure}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code)


def _written_whole(path: Path, text: str) -> bool:
    """Whether there was room for it. Whoever finds the file finds all of it."""
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return False
    return True


def failure_of(error: BaseException, rank: int, trace: str) -> Failure:
    """An exception of this process as a failure.

    Args:
        trace: how it came about.
    """
    code, message = _FAILED, str(error)
    if isinstance(error, KeyboardInterrupt):
        cause, code, message = Cause.STOPPED, _INTERRUPTED, "interrupted"
    elif isinstance(error, Interrupted):
        cause, code = Cause.SAVED, error.exit_code
    elif isinstance(error, OtherRankError):
        cause = Cause.TOLD
    elif isinstance(error, TightfitError):
        cause, code = Cause.SAID, error.exit_code
    elif _is_consequence(error):
        cause = Cause.LOST_TOUCH
    else:
        cause, message = Cause.FAULT, f"{type(error).__name__}: {error}\n{trace.rstrip()}"
    return Failure(rank, socket.gethostname(), os.getpid(), message, code, cause, time.time())


def read_failure(path: Path) -> Failure | None:
    """What a rank has written down; None where it has not."""
    return Failure.from_json(path.read_bytes()) if path.is_file() else None


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is not a consequence of another; the earliest, where all are."""
    return min(failures, key=lambda f: (f.cause in _CONSEQUENCES, f.seconds, f.rank))


def _is_consequence(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, distributed.DistError):
        return not any(words in str(error) for words in _OWN_FAULTS)
    return any(words in str(error) for words in _LOST_TOUCH)
