"""`tightfit plan`: the bill of plain training and the fastest plan that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tightfit.cli.convert import STANDARD_OUTPUT, Export
from tightfit.cli.notes import show_reading
from tightfit.cli.planning import planning_status
from tightfit.errors import DoesNotFitError
from tightfit.facts.config_checks import check_length
from tightfit.facts.hardware import Hardware, describe
from tightfit.facts.job import Job
from tightfit.facts.machine import describe_machine, machine_of
from tightfit.facts.model_spec import ModelSpec, load_model_spec
from tightfit.facts.workload import planned_workload
from tightfit.interop.reading import Reading
from tightfit.planner.machine import usable_hardware, with_all_cards
from tightfit.planner.plan import Plan
from tightfit.planner.pricing import Observe
from tightfit.planner.purchases import Purchase, purchases
from tightfit.planner.search import plan_job
from tightfit.report.tables import show_bill, show_plan, show_purchases


def run(
    job: Job,
    *,
    as_json: bool,
    reading: Reading | None = None,
    export: Export | None = None,
    buying: bool = False,
) -> int:
    """Plan a job; returns the exit code.

    Args:
        reading: of another tool's config that the job was taken from.
        export: where the plan goes for another tool.
        buying: say what a machine with one part more would change.
    """
    job = with_all_cards(job)
    hardware = usable_hardware(Path(job.output_dir or "."))
    spec = load_model_spec(job.model_name_or_path)
    too_long = check_length(spec, job.cutoff_len, scaled=job.rope_scaling is not None)
    with planning_status() as observe, _shortage_as_json(as_json=as_json):
        plan = plan_job(job, spec.config, planned_workload(job), hardware, observe=observe)
        bought = list(_purchases(job, spec, hardware, plan, observe)) if buying else None
    described = machine_of(job)
    machine = describe(hardware) if described is None else describe_machine(described)
    if as_json:
        more = {} if bought is None else {"buying": [one.to_json() for one in bought]}
        print(json.dumps(plan.to_json() | more, indent=2))
    else:
        aside = export is not None and export.target == STANDARD_OUTPUT
        console = Console(stderr=aside)
        _show(console, spec, machine, plan, too_long, reading)
        if bought is not None:
            show_purchases(console, bought)
    if export is not None:
        export.write(job, plan.policies)
    return 0


@contextmanager
def _shortage_as_json(*, as_json: bool) -> Iterator[None]:
    """Print what is short and what would do for programs too, where nothing fits."""
    try:
        yield
    except DoesNotFitError as error:
        if as_json:
            print(json.dumps(error.to_json(), indent=2))
        raise


def _purchases(
    job: Job, spec: ModelSpec, hardware: Hardware, plan: Plan, observe: Observe
) -> Iterator[Purchase]:
    def again(other: Job) -> Plan:
        return plan_job(other, spec.config, planned_workload(other), hardware, observe=observe)

    return purchases(job, plan, again)


def _show(
    console: Console,
    spec: ModelSpec,
    machine: Sequence[str],
    plan: Plan,
    too_long: str | None,
    reading: Reading | None,
) -> None:
    if reading is not None:
        show_reading(console, reading)
    for note in (*spec.assumptions, *([too_long] if too_long else [])):
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for line in machine:
        console.print(Text(line), soft_wrap=True)
    show_plan_with_bills(console, plan)


def show_plan_with_bills(console: Console, plan: Plan, *, written: bool = False) -> None:
    """The two bills with the plan between them; one where plain training is the plan.

    Args:
        written: whether a plan.yaml will say more.
    """
    show_bill(console, "Bill of plain training", plan.plain, plan.limits)
    show_plan(console, plan, written=written)
    if plan.bill != plan.plain:
        show_bill(console, "Bill of the plan", plan.bill, plan.limits)
