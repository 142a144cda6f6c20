"""`tightfit plan`: the bill of plain training and the fastest plan that fits."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tightfit.cli.quiet import quiet_libraries
from tightfit.dry_run import load_config
from tightfit.facts.hardware import describe
from tightfit.facts.job import Job
from tightfit.facts.model_spec import load_model_spec
from tightfit.facts.workload import Workload
from tightfit.planner.machine import usable_hardware
from tightfit.planner.plan import Plan
from tightfit.planner.search import plan_job
from tightfit.report.tables import show_bill, show_plan


def run(job: Job, *, as_json: bool) -> int:
    """Plan a job; returns the exit code."""
    quiet_libraries()
    hardware = usable_hardware(Path(job.output_dir or "."))
    spec = load_model_spec(job.model_name_or_path)
    plan = plan_job(job, load_config(spec.config), planned_workload(job), hardware)
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    console = Console()
    for line in describe(hardware):
        console.print(Text(line), soft_wrap=True)
    show_plan_with_bills(console, plan)
    return 0


def planned_workload(job: Job) -> Workload:
    """The shapes a job may have when its data was not looked at: everything as long as allowed."""
    evaluates = job.eval_dataset is not None or job.val_size > 0
    return Workload(
        sequence_length=job.cutoff_len,
        global_batch_size=job.global_batch_size,
        evaluation_sequence_length=job.cutoff_len if evaluates else 0,
        evaluation_batch_size=job.per_device_eval_batch_size,
    )


def show_plan_with_bills(console: Console, plan: Plan) -> None:
    """The two bills with the plan between them; one where plain training is the plan."""
    show_bill(console, "Bill of plain training", plan.plain, plan.limits)
    show_plan(console, plan)
    if plan.bill != plan.plain:
        show_bill(console, "Bill of the plan", plan.bill, plan.limits)
