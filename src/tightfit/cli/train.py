"""`tightfit train`: bill, plan, training, comparison, in the order in which they happen."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.text import Text

from tightfit.cli.plan import show_plan_with_bills
from tightfit.cli.planning import planning_status
from tightfit.errors import TrainingError
from tightfit.facts.hardware import describe
from tightfit.facts.job import Job
from tightfit.launch.agreement import Facts, facts_of
from tightfit.launch.environment import RankPlace
from tightfit.launch.group import from_first, meet, process_group
from tightfit.monitor.advice import CommunicationAdvice
from tightfit.monitor.history import append_entry, entry_of
from tightfit.monitor.progress import RunProgress
from tightfit.planner.plan import Plan
from tightfit.report.run_report import RunReport
from tightfit.report.tables import show_comparison
from tightfit.training.output import REPORT
from tightfit.training.preview import SamplePreview
from tightfit.training.run import PreparedRun, RunResult, enforced_bytes, make_plan, prepare, train
from tightfit.units import format_bytes, format_seconds


def run(job: Job, place: RankPlace | None = None) -> int:
    """Train a job; returns the exit code.

    Args:
        place: of this rank, where it is one of several; only rank 0 prints.
    """
    first = place is None or place.rank == 0
    console = Console(soft_wrap=False, quiet=not first)
    prepared = prepare(job)
    if prepared.steps_done >= prepared.total_steps:
        said = (
            f"nothing to do: the run in {prepared.output_dir} is finished at step "
            f"{prepared.steps_done}; raise max_steps or num_train_epochs to go on"
        )
        console.print(Text(said), soft_wrap=True)
        return 0
    _show_facts(console, prepared)
    if place is None:
        result = _train(console, prepared, _planned(console, prepared))
    else:
        result = _train_together(console, prepared, place)
    if not first:
        return 0
    report = RunReport(
        result.plan,
        result.measured,
        result.records,
        result.evaluations,
        result.answers,
        result.changes,
    )
    report.write(prepared.output_dir / REPORT)
    _show_result(console, prepared, report, result)
    _remember(console, prepared, report)
    return 0


def _remember(console: Console, prepared: PreparedRun, report: RunReport) -> None:
    """Add the run to the history of all runs."""
    seconds, share = report.step_seconds(), report.communication_share()
    if seconds is None or share is None:
        return  # no step was left to do
    hardware = prepared.hardware
    cards = hardware.accelerators
    entry = entry_of(
        report.plan,
        model=prepared.spec.name,
        device=cards[0].name if cards else hardware.cpu_name,
        steps=max(1, len(report.records) - 1),
        step_seconds=seconds,
        communication_seconds=share * seconds,
    )
    try:
        append_entry(entry)
    except OSError as error:
        said = f"note: the history of runs cannot be written ({error.strerror}: {error.filename})"
        console.print(Text(said, style="yellow"), soft_wrap=True)


def _planned(console: Console, prepared: PreparedRun) -> Plan:
    with planning_status() as observe:
        plan = make_plan(prepared, observe)
    show_plan_with_bills(console, plan, written=True)
    _warn_of_slow_precision(console, prepared, plan)
    return plan


def _train_together(console: Console, prepared: PreparedRun, place: RankPlace) -> RunResult:
    """Meet the other ranks, take rank 0's plan, and train."""
    timeout_seconds = prepared.job.ddp_timeout
    store = meet(place, _facts(prepared), timeout_seconds)
    # Only one rank plans, before there is a process group: a dry run passes for one itself.
    own = _planned(console, prepared) if place.rank == 0 else None
    with process_group(place, store, prepared.hardware.device_kind, timeout_seconds):
        return _train(console, prepared, from_first(own))


def _facts(prepared: PreparedRun) -> Facts:
    """What must be the same on all ranks."""
    data = prepared.data
    return {
        **facts_of(prepared.job, prepared.spec.config),
        "training samples": str(len(data.train)),
        "held-out samples": str(len(data.held_out)),
        "longest sample": str(prepared.workload.sequence_length),
        "kind of device": prepared.hardware.device_kind,
    }


def _show_facts(console: Console, prepared: PreparedRun) -> None:
    for line in describe(prepared.hardware):
        console.print(Text(line), soft_wrap=True)
    for line in prepared.data.report.lines():
        console.print(Text(line), soft_wrap=True)
    if prepared.too_long is not None:
        console.print(Text(prepared.too_long, style="yellow"), soft_wrap=True)
    if prepared.resume_from is not None:
        said = f"resuming from {prepared.resume_from}: {prepared.steps_done} steps are done"
        console.print(Text(said), soft_wrap=True)
    if prepared.job.preview:
        samples = prepared.data.train[: prepared.job.preview]
        console.print(SamplePreview(samples, prepared.tokenizer))


def _warn_of_slow_precision(console: Console, prepared: PreparedRun, plan: Plan) -> None:
    if prepared.hardware.device_kind == "cpu" and plan.policies.precision.parameters != "fp32":
        said = "16-bit products are slow on most CPUs; precision: fp32 trains far faster here"
        console.print(Text(said, style="yellow"), soft_wrap=True)


def _train(console: Console, prepared: PreparedRun, plan: Plan) -> RunResult:
    try:
        with RunProgress(console, prepared.total_steps, plan.limits.device_bytes) as progress:
            advice = CommunicationAdvice(
                plan,
                lambda said: console.print(Text(said, style="yellow"), soft_wrap=True),
                adapts=prepared.job.adapt,
            )
            return train(prepared, plan, [progress, advice])
    except torch.OutOfMemoryError as error:
        limit = enforced_bytes(prepared.job, plan)
        said = "" if limit is None else f" (limit {format_bytes(limit)})"
        raise TrainingError(
            f"out of memory although the bill fitted{said}: {error}. Lower memory_limit to leave "
            "more room, and report the case: a bill must never be low"
        ) from error


def _show_result(
    console: Console, prepared: PreparedRun, report: RunReport, result: RunResult
) -> None:
    show_comparison(console, report.differences())
    console.print(Text(f"device peak: predicted {report.peak_error():+.2%} against measured"))
    measured = report.step_seconds()
    if measured is not None:
        predicted = report.plan.step_time.total
        console.print(
            Text(
                f"step time: predicted {format_seconds(predicted)}, measured "
                f"{format_seconds(measured)} (median)"
            )
        )
    for text in report.changes_in_words():
        console.print(Text(text), soft_wrap=True)
    written = report.nvme_written_bytes()
    if written:
        a_day = format_bytes(round(report.nvme_written_bytes_per_day()))
        said = f"nvme: {format_bytes(written)} written per step, {a_day} a day at this pace"
        console.print(Text(said))
    if len(result.evaluations) > 1:
        first, last = result.evaluations[0], result.evaluations[-1]
        console.print(Text(f"held-out loss: {first.loss:.4f} before, {last.loss:.4f} after"))
    if prepared.job.sample_prompt is not None:
        console.print(Text(f"Q: {prepared.job.sample_prompt}", style="bold"))
        names = ("before", "after") if len(result.answers) == 2 else ("after",)
        for name, text in zip(names, result.answers, strict=True):
            console.print(Text(f"{name}: {text}"), soft_wrap=True)
    saved = f"saved: {result.checkpoint}; report: {prepared.output_dir / REPORT}"
    console.print(Text(saved), soft_wrap=True)
