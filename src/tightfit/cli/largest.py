"""`tightfit plan --largest`: the largest model that a machine can train, for each way to train."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.cli.planning import planning_status
from tightfit.facts.hardware import describe
from tightfit.facts.job import Job
from tightfit.facts.machine import describe_machine, machine_of
from tightfit.planner.largest import Largest, largest_models
from tightfit.planner.machine import usable_hardware
from tightfit.planner.words import describe_policies
from tightfit.units import format_bytes, format_seconds


def run(job: Job, *, as_json: bool) -> int:
    """Look for them; returns the exit code: 3 where the machine can train none.

    Args:
        job: whose model does not matter.
    """
    hardware = usable_hardware(Path(job.output_dir or "."))
    with planning_status() as observe:
        found = list(largest_models(job, hardware, observe))
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2))
    else:
        described = machine_of(job)
        console = Console()
        for line in describe(hardware) if described is None else describe_machine(described):
            console.print(Text(line), soft_wrap=True)
        said = f"{job.global_batch_size} x {job.cutoff_len} tokens per step"
        console.print(Text(f"Largest models of the catalogue, {said}", style="bold"))
        for one in found:
            console.print(_table(one))
    return 0 if any(one.plan for one in found) else 3


def _table(one: Largest) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if one.plan is None:
        table.add_row(one.way, "none fits")
        return table
    peaks = ", ".join(
        f"{tier} {format_bytes(one.plan.bill.peak_bytes(tier))}" for tier in one.plan.bill.tiers()
    )
    table.add_row(one.way, f"{one.model}, {one.parameters / 1e9:.2f} billion parameters")
    table.add_row("", describe_policies(one.plan.policies))
    table.add_row("", f"{peaks}; {format_seconds(one.plan.step_time.total)} per step")
    return table
