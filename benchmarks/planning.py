"""Plans of the jobs of `planning_cases.py`: what is chosen, its bill and time, and how long it
took to find.

    OMP_NUM_THREADS=1 python benchmarks/planning.py          # what is missing
    OMP_NUM_THREADS=1 python benchmarks/planning.py --again  # everything
    python benchmarks/planning.py --page                     # only the page

Every job is planned with nothing kept from another. Results are kept in `results/planning.json` as
they are made; then the tables of `docs/planning.md` are written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from planning_cases import CLUSTERS, CONSUMER, RULES, Found, Keys, as_json
from planning_page import filled
from tightfit.bill.table import Kind
from tightfit.dry_run.cache import FOLDER_VARIABLE
from tightfit.errors import DoesNotFitError
from tightfit.facts.job import Job
from tightfit.facts.machine import machine_of
from tightfit.facts.model_spec import load_model_spec
from tightfit.facts.workload import planned_workload
from tightfit.planner.machine import usable_hardware
from tightfit.planner.plan import Plan
from tightfit.planner.search import plan_job
from tightfit.planner.words import describe_policies
from tightfit.policies import Tier

RESULTS = Path(__file__).parent / "results" / "planning.json"
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="plan everything anew")
    parser.add_argument("--page", action="store_true", help="write the page, plan nothing")
    parser.add_argument("--only", help="jobs whose keys contain this")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows: dict[str, Any] = {} if arguments.again else results.get("jobs", {})
    for keys in () if arguments.page else all_jobs():
        name = name_of(keys)
        if name in rows or (arguments.only and arguments.only not in name):
            continue
        print(name, flush=True)
        _, rows[name] = planned(keys)
        print(f"  {rows[name]['plan']}, {rows[name]['planning_seconds']:.1f} s", flush=True)
        RESULTS.write_text(json.dumps({**made_by(), "jobs": rows}, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))


def all_jobs() -> list[Keys]:
    """Each once."""
    listed = [one.keys for one in (*CONSUMER, *CLUSTERS)]
    listed += [keys for rule in RULES for keys in rule.jobs]
    return list({name_of(keys): keys for keys in listed}.values())


def name_of(keys: Keys) -> str:
    return json.dumps(keys, sort_keys=True)


def planned(keys: Keys) -> tuple[Found, dict[str, Any]]:
    """What became of a job, and its row."""
    job = Job(**keys)
    spec = load_model_spec(job.model_name_or_path)
    hardware = usable_hardware(Path())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {FOLDER_VARIABLE: folder}):
        try:
            plan = plan_job(job, spec.config, planned_workload(job), hardware)
        except DoesNotFitError as error:
            became = Found(None, float("inf"), 0, 0, 1.0, short=error.shortage)
            said = {"plan": "nothing fits", "said": str(error)}
        else:
            became, said = found(plan), row(job, plan)
    seconds = time.perf_counter() - began
    return became, said | {"planning_seconds": seconds, "found": as_json(became)}


def found(plan: Plan) -> Found:
    limit, plain = plan.limits.device_bytes, plan.plain.peak_bytes(Tier.DEVICE)
    shortage = 0.0 if limit is None else 1 - limit / plain
    peaks = (plan.bill.peak_bytes(tier) for tier in (Tier.DEVICE, Tier.NVME))
    parameters = plan.bill.kinds_at_peak(Tier.DEVICE).get(Kind.PARAMETERS, 0)
    return Found(plan.policies, plan.step_time.total, *peaks, shortage, plain, parameters)


def row(job: Job, plan: Plan) -> dict[str, Any]:
    machine = machine_of(job)
    assert machine is not None
    return {
        "plan": describe_policies(plan.policies),
        "plain_bytes": plan.plain.peak_bytes(Tier.DEVICE),
        "limits": asdict(plan.limits),
        "peak_bytes": {str(tier): plan.bill.peak_bytes(tier) for tier in Tier},
        "step_seconds": plan.step_time.to_json(),
        "tokens_per_second": job.global_batch_size * job.cutoff_len / plan.step_time.total,
        "bottleneck": plan.bottleneck,
    }


def made_by() -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "versions": f"torch {version('torch')}, transformers {version('transformers')}",
        "machine": f"{platform.system()} {platform.machine()}, python {platform.python_version()}, "
        f"{os.cpu_count()} processors",
    }


if __name__ == "__main__":
    sys.exit(main())
