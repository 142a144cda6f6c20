"""What is known of each optimizer step and each evaluation. Plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        loss: per trained token of the global batch.
        learning_rate: that of this step.
        grad_norm: exact global norm before clipping.
        tokens: processed, padding included.
        seconds: of the whole step, data and scheduler included.
        device_bytes: living on the device tier at the end; None where nobody counts.
        device_peak_bytes: highest so far.
        skipped: the norm was not finite and nothing was updated.
        loss_scale: that gradients in fp16 were made with; None where they are of another type.
        nvme_written_bytes: to the disk that model states are placed on, for the last update that
            was finished by then; it wears the disk off.
        communication_seconds: that this rank has waited for others in, not hidden by computing;
            of rank 0, where a run's records are kept. 0 with one rank.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    seconds: float
    device_bytes: int | None
    device_peak_bytes: int | None
    skipped: bool = False
    nvme_written_bytes: int = 0
    communication_seconds: float = 0.0
    loss_scale: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Processed tokens over wall time."""
        return self.tokens / self.seconds

    @property
    def communication_share(self) -> float:
        """The part of the step that was spent waiting for other ranks, 0 to 1."""
        return self.communication_seconds / self.seconds

    def to_json(self) -> dict[str, object]:
        """Its fields; numbers that are not finite become None."""
        return _finite(asdict(self))


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation: held-out loss per trained token."""

    step: int
    loss: float
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Its fields; numbers that are not finite become None."""
        return _finite(asdict(self))


def _finite(fields: dict[str, object]) -> dict[str, object]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
