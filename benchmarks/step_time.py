"""Predicted beside measured seconds of a step: real runs of the demo's model on 1, 2 and 4 ranks.

    python benchmarks/step_time.py            # probe, train, write
    python benchmarks/step_time.py --page     # only the page

The machine is probed for each number of ranks, then each job is planned from that probe and
trained by `tightfit train`; what it says is what the history of runs says (docs/probe.md). Prepare
the model first (`make demo`). Writes benchmarks/results/step_time.json and step_time.md; takes some
ten minutes on two cores, which should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STEPS = 6
ALLOWED_ERROR = 0.25
JOB = {
    "model_name_or_path": "examples/.cache/smollm2-135m-instruct",
    "dataset": "examples/.cache/demo.jsonl",
    "cutoff_len": 128,
    "train_batch_size": 4,
    "per_device_train_batch_size": 1,
    "max_steps": STEPS,
    "precision": "fp32",
    "loss": "chunked",
    "gradient_checkpointing": "false",
    "offload_optimizer": "none",
    "offload_param": "none",
    "offload_activations": "false",
    "memory_limit": "none",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_replicas": 1,
    "save_only_model": "true",
}
CHECKPOINTING = {"gradient_checkpointing": "true"}
OPTIMIZER, PARAMETERS = {"offload_optimizer": "cpu"}, {"offload_param": "cpu"}


@dataclass(frozen=True)
class Run:
    """What is told apart, and what its job says beside `JOB`."""

    name: str
    ranks: int
    keys: dict[str, Any]


RUNS = [
    Run("everything on the device", 1, {}),
    Run("checkpointing", 1, CHECKPOINTING),
    Run("optimizer on the host", 1, OPTIMIZER),
    Run("optimizer and parameters on the host, checkpointing", 1,
        OPTIMIZER | PARAMETERS | CHECKPOINTING),
    Run("ZeRO-0", 2, {"zero_stage": 0}),
    Run("ZeRO-3, checkpointing", 2, {"zero_stage": 3} | CHECKPOINTING),
    Run("ZeRO-2, optimizer on the host", 2, {"zero_stage": 2} | OPTIMIZER),
    Run("pipeline of 2 stages, checkpointing", 2,
        {"pipeline_parallel_size": 2} | CHECKPOINTING),
    Run("ZeRO-3", 4, {"zero_stage": 3}),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page, run nothing")
    path = RESULTS / "step_time.json"
    if not parser.parse_args().page:
        path.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    results = json.loads(path.read_text(encoding="utf-8"))
    (RESULTS / "step_time.md").write_text(page(results), encoding="utf-8")
    return 0 if all(abs(row["error"]) <= ALLOWED_ERROR for row in results["runs"]) else 1


def measured() -> dict[str, Any]:
    """All runs, each beside what its plan had predicted."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TIGHTFIT_CACHE": folder}
        probed = None
        for run in RUNS:
            ranks = max(run.ranks, 2)  # a link needs two; what one rank has is measured with it
            if ranks != probed:
                _tightfit(["probe", "--no-disk", "--num_gpus", str(ranks)], environment)
                probed = ranks
            keys = JOB | run.keys | {"num_gpus": run.ranks, "output_dir": f"{folder}/run"}
            words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
            _tightfit(["train", *words, "--overwrite_output_dir"], environment)
            line = (Path(folder) / "history.jsonl").read_text(encoding="utf-8").splitlines()[-1]
            rows.append(row(run, json.loads(line)))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return {
        "made_by": f"{date.today()}, Python {platform.python_version()}, {packages}, "
        f"{platform.machine()}, {os.cpu_count()} processors",
        "runs": rows,
    }


def _tightfit(words: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tightfit", *words]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)


def row(run: Run, entry: dict[str, Any]) -> dict[str, Any]:
    """Of a line of the history."""
    assert entry["ranks"] == run.ranks
    step = entry["step"]
    return {
        "name": run.name,
        "ranks": run.ranks,
        "rates": entry["rates"],
        "steps": entry["steps"],
        "predicted": step["predicted"],
        "measured": step["measured"],
        "error": (step["predicted"] - step["measured"]) / step["measured"],
        "parts": {name: part["predicted"] for name, part in entry["parts"].items()},
    }


def page(results: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Predicted beside measured step times",
        "",
        f"{results['made_by']}. SmolLM2-135M, {JOB['train_batch_size']} sequences of up to "
        f"{JOB['cutoff_len']} tokens a step, medians of {STEPS} steps but the first; predicted "
        "from a probe of the machine just before. `python benchmarks/step_time.py` makes it again; "
        "do not edit.",
        "",
        "| run | ranks | predicted s | measured s | error | largest predicted parts |",
        "|---|---|---|---|---|---|",
    ]
    for found in results["runs"]:
        largest = sorted(found["parts"].items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in largest if seconds > 0)
        lines.append(
            f"| {found['name']} | {found['ranks']} | {found['predicted']:.2f} "
            f"| {found['measured']:.2f} | {found['error']:+.0%} | {parts} |"
        )
    within = sum(abs(found["error"]) <= ALLOWED_ERROR for found in results["runs"])
    lines += ["", f"Within {ALLOWED_ERROR:.0%}: {within} of {len(results['runs'])}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
