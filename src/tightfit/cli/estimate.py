"""`tightfit estimate`: the bill of a job exactly as it is typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tightfit.bill.comparison import ComparisonRow
from tightfit.bill.other_engines import DeepSpeedBuckets
from tightfit.bill.table import Kind
from tightfit.cli.notes import reading_json, show_both, show_reading
from tightfit.facts.config_checks import check_length
from tightfit.facts.job import Job
from tightfit.facts.machine import describe_machine, machine_of
from tightfit.facts.model_spec import ModelSpec, load_model_spec
from tightfit.facts.workload import Workload, planned_workload
from tightfit.interop.reading import Reading, Tool
from tightfit.planner.estimate import (
    Estimate,
    compare_engines,
    compare_ways,
    estimate_job,
    price_tool,
)
from tightfit.planner.machine import usable_hardware
from tightfit.planner.words import describe_policies, techniques
from tightfit.report.comparison import (
    engines_json,
    show_engines,
    show_strategies,
    strategies_json,
)
from tightfit.report.tables import show_estimate
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.planner.elsewhere import Elsewhere


def run(
    job: Job,
    *,
    as_json: bool,
    compare: bool = False,
    picture: Path | None = None,
    reading: Reading | None = None,
) -> int:
    """Estimate a job; returns the exit code, 0 also where it does not fit.

    Args:
        compare: show the ways to share the model states out as well.
        picture: a new file to draw the bill into.
        reading: of another tool's config that the job was taken from; billed for that tool too.
    """
    if picture is not None:
        from tightfit.report.picture import check_picture_path  # only this needs templates

        check_picture_path(picture)
    spec = load_model_spec(job.model_name_or_path).text_part()
    too_long = check_length(spec, job.cutoff_len, scaled=job.rope_scaling is not None)
    workload = planned_workload(job)
    found = estimate_job(job, spec.config, workload, usable_hardware(Path()))
    rows, refused = compare_ways(found, spec.config, workload) if compare else ([], [])
    notes = (*spec.assumptions, *([too_long] if too_long else []), *found.notes, *refused)
    engines = compare_engines(found, spec.config, workload) if compare else []
    tool = None if reading is None else _price_tool(found, spec, workload, reading.tool)
    if as_json:
        content = {**found.to_json(), "notes": list(notes)}
        if compare:
            ranks = rows[0].policies.sharding.ranks if rows else 1
            limits = replace(found.limits, ranks=ranks)
            content["compare"] = strategies_json(rows, limits)
            content["elsewhere"] = engines_json(engines)
        if reading is not None and tool is not None:
            content["config"] = reading_json(reading, tool, found.bill)
        print(json.dumps(content, indent=2))
    else:
        if reading is not None:
            show_reading(Console(), reading)
        _show(spec, job, found, notes)
        if reading is not None and tool is not None:
            show_both(Console(), reading, tool, found.bill)
        _show_others(spec, found, rows, engines)
    if picture is not None:
        _draw(picture, spec, job, found, notes)
    return 0


def _price_tool(found: Estimate, spec: ModelSpec, workload: Workload, tool: Tool) -> Elsewhere:
    """The bill of the tool that the config was for, with the buffers that the config gives it."""
    details: dict[str, Any] = {}
    if tool.engine == "deepspeed":
        details["deepspeed"] = DeepSpeedBuckets(**tool.buffers)
    if tool.keep_layers:
        details["keep_layers"] = True
    return price_tool(found, spec.config, workload, tool.engine, **details)


def _show_others(
    spec: ModelSpec, found: Estimate, rows: list[ComparisonRow], engines: list[Elsewhere]
) -> None:
    console = Console()
    if rows:
        cards = rows[0].policies.sharding.ranks
        console.print()
        limits = replace(found.limits, ranks=cards)
        show_strategies(console, f"{spec.name} on {cards} cards", rows, limits)
    if engines:
        console.print()
        show_engines(console, "This job with other engines, on each card", engines)


def _show(spec: ModelSpec, job: Job, found: Estimate, notes: tuple[str, ...]) -> None:
    console = Console()
    machine = machine_of(job)
    for line in [] if machine is None else describe_machine(machine):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(_model_line(spec, found)), soft_wrap=True)
    show_estimate(console, _title(job, found), found.bill, found.limits)
    console.print(Text(_machine_line(found)), soft_wrap=True, end="")
    for note in notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def _title(job: Job, found: Estimate) -> str:
    whose = " of each rank" if found.policies.sharding.ranks > 1 else ""
    return f"Bill{whose} of {describe_policies(found.policies)}, {job.cutoff_len} tokens"


def _model_line(spec: ModelSpec, found: Estimate) -> str:
    """The model, its parameters, and what papers print for them."""
    totals = found.totals
    said = f"{spec.name}: {totals.trainable:,} parameters trained"
    if totals.frozen:
        said += f", {totals.frozen:,} frozen"
    if totals.quantised:
        said += f", {totals.quantised:,} frozen in {_bits(found)} bits"
    precision = found.policies.precision.parameters
    return f"{said}, {precision}; {_textbook(found)}"


def _textbook(found: Estimate) -> str:
    """What papers print, all tiers together."""
    textbook = found.textbook().values()
    activations = sum(kinds.get(Kind.ACTIVATIONS, 0) for kinds in textbook)
    states = sum(sum(kinds.values()) for kinds in textbook) - activations
    whose = " of a rank" if found.policies.sharding.ranks > 1 else ""
    return (
        f"textbook model states{whose} {format_bytes(states)}, "
        f"activations {format_bytes(activations)}"
    )


def _machine_line(found: Estimate) -> str:
    """What the ranks of a machine take together; nothing to say of one."""
    ranks = found.limits.ranks
    taken = {tier: count for tier, count in found.machine_bytes().items() if count}
    if ranks == 1 or not taken:
        return ""
    each = ", ".join(f"{tier} {format_bytes(count)}" for tier, count in taken.items())
    return f"all {ranks} ranks of a machine: {each}\n"


def _bits(found: Estimate) -> int:
    assert found.policies.quantisation is not None
    return found.policies.quantisation.bits


def _draw(path: Path, spec: ModelSpec, job: Job, found: Estimate, notes: tuple[str, ...]) -> None:
    from tightfit.report.picture import Picture, write_picture

    facts = [("model", _model_line(spec, found)), *techniques(found.policies).items()]
    facts += [("note", note) for note in notes]
    write_picture(path, Picture(_title(job, found), facts, found.bill, found.limits))
