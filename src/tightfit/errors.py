"""Errors that tightfit raises for its users, each with the exit code of the command line.

A message says what happened, where (file, row, key) and what to do. Broken invariants of
tightfit itself are assertions, not these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TightfitError(Exception):
    """Something a user can act on; `str(error)` is the whole message."""

    exit_code = 1


class InputError(TightfitError, ValueError):
    """Wrong arguments, configuration or data."""

    exit_code = 2


class ConfigError(InputError):
    """A key or value of the job is unknown, of the wrong type, out of range or contradicting."""


class DataError(InputError):
    """A data file is missing, broken or unusable."""


class ModelNotFoundError(InputError):
    """The model is no folder or file, and not in the Hub cache, the catalogue or on the Hub."""


class UnsupportedError(InputError):
    """A combination that cannot work; the message names the nearest one that does."""


class DoesNotFitError(TightfitError):
    """No plan fits the limits.

    Attributes:
        missing_bytes: how much the closest plan lacks, on the tier where it lacks most.
        shortage: bytes that it lacks by the limit that is short: `device`, `host`, `nvme`, or `RAM`
            where device and host share it.
        advice: what would fit, in words.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        missing_bytes: int,
        shortage: Mapping[str, int] | None = None,
        advice: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.shortage = dict(shortage or {})
        self.advice = tuple(advice)

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        return {
            "error": str(self).splitlines()[0],
            "shortage": self.shortage,
            "advice": list(self.advice),
        }


class TrainingError(TightfitError):
    """Training cannot go on: the loss is not a number any more, or memory ran out."""


class OtherRankError(TrainingError):
    """What another rank has failed at, and says itself; this one cannot go on without it."""


class Interrupted(TightfitError):
    """The user stopped the run; the message says what the last checkpoint is."""

    exit_code = 130


class RankError(TightfitError):
    """A rank failed, was killed or did not answer; the message names it.

    Attributes:
        exit_code: of the rank, where it ended by itself.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
