"""`tightfit estimate`: the bill of a job exactly as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tightfit.cli.plan import planned_workload
from tightfit.cli.quiet import quiet_libraries
from tightfit.dry_run import load_config
from tightfit.facts.job import Job
from tightfit.facts.model_spec import load_model_spec
from tightfit.planner.machine import usable_hardware
from tightfit.planner.plan import describe_policies
from tightfit.planner.search import estimate_job
from tightfit.report.tables import show_bill


def run(job: Job, *, as_json: bool) -> int:
    """Estimate a job; returns the exit code, 0 also where it does not fit."""
    quiet_libraries()
    spec = load_model_spec(job.model_name_or_path)
    plan = estimate_job(
        job, load_config(spec.config), planned_workload(job), usable_hardware(Path())
    )
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    console = Console()
    counts = f"{plan.trainable_parameters:,} parameters trained"
    if plan.frozen_parameters:
        counts += f", {plan.frozen_parameters:,} frozen"
    said = f"{spec.name}: {counts}, {plan.policies.precision.parameters}"
    console.print(Text(said), soft_wrap=True)
    title = f"Bill of {describe_policies(plan.policies)}, {job.cutoff_len} tokens"
    show_bill(console, title, plan.bill, plan.limits)
    return 0
