"""Two "machines" of two ranks each: replicas of shards beside ZeRO-3, and a cable that is cut.

    sudo .venv/bin/python benchmarks/two_machines.py

Both are network namespaces of this host, joined by a link of a limited rate (`machine_link.py`);
the job runs through `tightfit train --nnodes 2`. Measured are the seconds of a step and the bytes
that went over the link, beside those that the planner predicts. Then the link is taken down in the
middle of a step and comes back. Writes benchmarks/results/two_machines.md; takes some five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from machine_link import Link, why_not
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import ModelSizes, bytes_between_machines, exchanges
from tightfit.policies import BatchPolicy, Policies, PrecisionPolicy, ShardingPolicy
from two_machines_job import MACHINES, RANKS, TOKENS, job, make_model, make_rows

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "two_machines.md"
MEGABIT, GIGABIT = 10**6, 10**9
RATES = {"100 Mbit/s": 100 * MEGABIT, "1 Gbit/s": GIGABIT}
WAYS = {
    "ZeRO-3 over all 4 ranks": ShardingPolicy(RANKS, 3),
    "ZeRO-3 on each machine, 2 replicas": ShardingPolicy(RANKS, 3, replicas=MACHINES),
}
CUT_AFTER, SAVED, CUT_STEPS = 3, 2, 6
CUT_SECONDS = 14.0
LOOK_SECONDS = 0.01


@dataclass
class Said:
    """What a machine's command has printed to stderr: seconds and line."""

    lines: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """Of a run without trouble: medians of its steps but the first."""

    seconds: float
    waited: float
    link_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-output", action="store_true", help="print the page only")
    arguments = parser.parse_args()
    missing = why_not()
    if missing is not None:
        sys.exit(f"two_machines.py cannot run here: {missing}")
    with tempfile.TemporaryDirectory() as name, Link() as link:
        folder = Path(name)
        sizes = make_model(folder / "model")
        make_rows(folder / "rows.jsonl")
        page = [*heading(sizes.trainable), *compare(link, folder, sizes), *cut(link, folder)]
    text = "\n".join(page) + "\n"
    print(text)
    if not arguments.no_output:
        RESULT.write_text(text, encoding="utf-8")


# Running


def start(link: Link, path: Path, number: int, said: Said) -> subprocess.Popen[str]:
    """`tightfit train` on a machine; a thread keeps what it says and when."""
    words = [sys.executable, "-m", "tightfit", "train", str(path), "--node_rank", str(number)]
    process = subprocess.Popen(
        link.command(number, words),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stderr = process.stderr
    assert stderr is not None

    def listen() -> None:
        for line in stderr:
            said.lines.append((time.monotonic(), line.rstrip()))

    threading.Thread(target=listen, daemon=True).start()
    return process


def records(path: Path) -> list[dict[str, Any]]:
    """Steps that the log of a run has so far."""
    log = path.parent / "run" / "trainer_log.jsonl"
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [each for each in whole if each["event"] == "step"]


def run(link: Link, path: Path) -> Measured:
    """Run to the end, and count bytes whenever a step is done."""
    said = [Said() for _ in range(MACHINES)]
    processes = [start(link, path, number, said[number]) for number in range(MACHINES)]
    counts: list[int] = []
    while any(process.poll() is None for process in processes):
        if len(records(path)) > len(counts):
            counts.append(max(link.sent_bytes()))
        time.sleep(LOOK_SECONDS)
    if any(process.returncode for process in processes):
        sys.exit("\n".join(line for each in said for _, line in each.lines))
    steps = records(path)[1:]
    between = [after - before for before, after in pairwise(counts)]
    return Measured(
        median(step["seconds"] for step in steps),
        median(step["communication_seconds"] for step in steps),
        median(between),
    )


# The page


def heading(parameters: int) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return [
        "# Two machines",
        "",
        "Written by `benchmarks/two_machines.py`, which says how to make it again; do not edit.",
        "",
        f"{date.today()}, Python {platform.python_version()}, {packages}, gloo, "
        f"{os.cpu_count()} cores for {RANKS} ranks. Two network namespaces of one host, two ranks "
        f"each, joined by a veth pair limited by `tbf`. A Llama of {parameters / 1e6:.1f}M "
        f"parameters in fp32, one sequence of {TOKENS} tokens for each rank: little to compute and "
        "all of the model to send, so that the link decides.",
        "",
    ]


def compare(link: Link, folder: Path, sizes: ModelSizes) -> list[str]:
    """Both ways at every rate."""
    lines = [
        "| link | sharding | seconds a step | of them waiting | MiB over the link a step, "
        "each way | predicted MiB |",
        "|---|---|---|---|---|---|",
    ]
    ratios = []
    for rate_name, rate in RATES.items():
        link.limit(rate)
        found = {}
        for number, (way, sharding) in enumerate(WAYS.items()):
            name = f"{rate} {number}"
            measured = found[way] = run(link, job(folder, name, sharding))
            lines.append(
                f"| {rate_name} | {way} | {measured.seconds:.2f} | {measured.waited:.2f} "
                f"| {measured.link_bytes / 2**20:.1f} "
                f"| {predicted_bytes(sizes, sharding) / 2**20:.1f} |"
            )
        all_ranks, replicas = found.values()
        ratios.append(
            f"- {rate_name}: a step with replicas takes {replicas.seconds / all_ranks.seconds:.2f} "
            f"of the time and {replicas.link_bytes / all_ranks.link_bytes:.2f} of the bytes."
        )
    return [*lines, "", *ratios, ""]


def predicted_bytes(sizes: ModelSizes, sharding: ShardingPolicy) -> float:
    """What the planner takes a machine to send to the other in a step."""
    policies = Policies(
        batch=BatchPolicy(1, 1), precision=PrecisionPolicy("fp32"), sharding=sharding
    )
    found = exchanges(sizes, policies, Workload(TOKENS, RANKS))
    return bytes_between_machines(found, policies, MACHINES)


def cut(link: Link, folder: Path) -> list[str]:
    """A run whose link is down for a while, beside one that nothing happens to."""
    link.limit(GIGABIT)
    sharding = WAYS["ZeRO-3 over all 4 ranks"]
    keys: dict[str, Any] = {
        "max_steps": CUT_STEPS, "save_strategy": "steps", "save_steps": SAVED, "max_restarts": 1,
    }  # fmt: skip
    undisturbed = job(folder, "undisturbed", sharding, **keys)
    run(link, undisturbed)
    path = job(folder, "cut", sharding, **keys)
    said = [Said() for _ in range(MACHINES)]
    processes = [start(link, path, number, said[number]) for number in range(MACHINES)]
    while len(records(path)) < CUT_AFTER and all(p.poll() is None for p in processes):
        time.sleep(LOOK_SECONDS)
    link.cut()
    began = time.monotonic()
    time.sleep(CUT_SECONDS)
    link.mend()
    codes = [process.wait() for process in processes]
    seconds = time.monotonic() - began
    wanted = {step["step"]: step["loss"] for step in records(undisturbed)}
    found = {step["step"]: step["loss"] for step in records(path)}
    furthest = max(abs(found[step] / loss - 1) for step, loss in wanted.items())
    lines = [
        "## A cable that is cut",
        "",
        f"ZeRO-3 over all ranks at 1 Gbit/s, `max_restarts: 1`, a checkpoint every {SAVED} steps. "
        f"After step {CUT_AFTER}, in the middle of the next, the link went down for "
        f"{CUT_SECONDS:.0f} s. Seconds since then, and what each machine said:",
        "",
    ]
    for number, each in enumerate(said):
        lines += [f"Machine {number}:", ""]
        lines += [f"    {at - began:5.1f}  {line}" for at, line in each.lines if line]
        lines.append("")
    lines += [
        f"Both ended with exit codes {codes[0]} and {codes[1]}, {seconds:.1f} s after the cut. "
        f"Losses of all {CUT_STEPS} steps are those of a run that was not cut, within "
        f"{furthest:.0e}.",
    ]
    return [line.replace(str(folder), "...") for line in lines]


if __name__ == "__main__":
    main()
