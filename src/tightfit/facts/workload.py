"""The shape of the work: how long the sequences are and how many make one optimizer step.

Knows nothing about models, machines or how the work is split; that is a plan's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.errors import ConfigError
from tightfit.facts.job import Job


@dataclass(frozen=True)
class Workload:
    """What one optimizer step and one evaluation must process.

    Attributes:
        sequence_length: tokens of the longest training sequence.
        global_batch_size: sequences per optimizer step.
        evaluation_sequence_length: tokens of the longest held-out sequence; 0 without evaluation.
        evaluation_batch_size: sequences per evaluation forward.
        average_sequence_length: tokens of a training sequence, padding included, over the whole
            data; 0: all are as long as the longest. Decides time, as the longest decides memory.
        prompt_length: tokens of the longest prompt that is answered; 0 without generation.
        max_new_tokens: of the longest answer.
    """

    sequence_length: int
    global_batch_size: int
    evaluation_sequence_length: int = 0
    evaluation_batch_size: int = 1
    prompt_length: int = 0
    max_new_tokens: int = 1
    average_sequence_length: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "sequence_length",
            "global_batch_size",
            "evaluation_batch_size",
            "max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("evaluation_sequence_length", "prompt_length", "average_sequence_length"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, it is {getattr(self, name)}")

    @property
    def tokens_per_step(self) -> int:
        """Upper bound of the tokens in one optimizer step, padding included."""
        return self.sequence_length * self.global_batch_size

    @property
    def average_tokens_per_step(self) -> float:
        """Tokens of an average optimizer step, padding included."""
        return (self.average_sequence_length or self.sequence_length) * self.global_batch_size


def planned_workload(job: Job) -> Workload:
    """The shapes a job may have when its data was not looked at: everything as long as allowed."""
    evaluates = job.eval_dataset is not None or job.val_size > 0
    asks = job.sample_prompt is not None
    return Workload(
        sequence_length=job.cutoff_len,
        global_batch_size=job.global_batch_size,
        evaluation_sequence_length=job.cutoff_len if evaluates else 0,
        evaluation_batch_size=job.per_device_eval_batch_size,
        prompt_length=max(1, job.cutoff_len - job.max_new_tokens) if asks else 0,
        max_new_tokens=job.max_new_tokens,
    )
