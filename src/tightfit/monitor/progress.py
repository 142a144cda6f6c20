"""The progress bar of a run: loss, rate, norm, speed, device memory against its limit, time left.

Plain lines where the output is not a terminal. Knows records, not where they come from.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.units import format_bytes, format_seconds


class RunProgress:
    """Shows records as they come; a context manager around training.

    Args:
        total_steps: optimizer steps of the whole run.
        limit_bytes: of the device tier; None for no limit.
    """

    def __init__(self, console: Console, total_steps: int, limit_bytes: int | None) -> None:
        self._console = console
        self._total = total_steps
        self._limit = limit_bytes
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[line]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total_steps, line="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        line = _line(record, self._limit)
        self._bar.update(self._task, completed=record.step, line=line)
        if record.skipped:
            scale = record.loss_scale
            why = "" if scale is None else f" with a loss scale of {scale:g}"
            self._console.print(
                f"step {record.step} skipped: gradient norm {record.grad_norm}{why}", style="yellow"
            )
        elif not self._console.is_terminal:
            left = (self._total - record.step) * record.seconds
            self._console.print(
                f"step {record.step}/{self._total} {line}  left {format_seconds(left)}",
                highlight=False,
                soft_wrap=True,
            )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show one evaluation."""
        self._console.print(
            f"held-out loss {record.loss:.4f} after step {record.step} "
            f"({format_seconds(record.seconds)})",
            highlight=False,
        )

    def changed(self, change: PlanChange) -> None:
        """Say what changes and why."""
        self._console.print(Text(str(change), style="yellow"), soft_wrap=True)


def _line(record: StepRecord, limit: int | None) -> str:
    parts = [
        f"loss {record.loss:.4f}",
        f"lr {record.learning_rate:.2e}",
        f"norm {record.grad_norm:.2f}",
        f"{record.tokens_per_second:.0f} tok/s",
    ]
    if record.communication_seconds:
        parts.append(f"comm {record.communication_share:.0%}")
    if record.device_peak_bytes is not None:
        now = "" if record.device_bytes is None else f"{format_bytes(record.device_bytes)} now, "
        most = "" if limit is None else f" of {format_bytes(limit)}"
        parts.append(f"device {now}peak {format_bytes(record.device_peak_bytes)}{most}")
    return "  ".join(parts)
