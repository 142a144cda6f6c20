"""The demo three ways: plain, as planned, and with LoRA.

Shows that the predicted device peak is within 3% of the measured one and never below it, and that
the plan's loss trajectory is that of plain training. Prepare the demo first (`make demo`), then

    python benchmarks/demo_proof.py > benchmarks/results/demo_proof.md

Takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JOBS = {
    "plain, no limit": ["--memory_limit", "none"],
    "the demo's plan, 900 MiB": [],
    "LoRA, no limit": ["--memory_limit", "none", "--finetuning_type", "lora"],
}
# The plan computes the loss in chunks of tokens, so the same products are rounded in another
# order, and training amplifies what it is given. The largest part of the difference is torch's:
# on this model the loss of its fp32 log-softmax on a CPU is 3e-6 below that of float64, the chunked
# one is within 2e-8. Twenty-four steps stay below this bound by a factor of ten.
TOLERANCE = 1e-4
ALLOWED_ERROR = 0.03


def main() -> int:
    """Run the three jobs and print the tables; 1 if a claim does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        reports = {
            name: run_job(flags, Path(folder) / str(index))
            for index, (name, flags) in enumerate(JOBS.items())
        }
    print("# The demo three ways\n")
    print(versions(), "\n")
    held = print_peaks(reports)
    plain, planned, _ = reports.values()
    return 0 if print_trajectories(plain, planned) and held else 1


def run_job(flags: list[str], output_dir: Path) -> dict[str, Any]:
    """Train one job in a process of its own and return its report."""
    command = [sys.executable, "-m", "tightfit", "train", "examples/demo.yaml"]
    command += ["--output_dir", str(output_dir), *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    report: dict[str, Any] = json.loads((output_dir / "report.json").read_text(encoding="utf-8"))
    return report


def versions() -> str:
    """What this ran on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    return f"{date.today()}, Python {platform.python_version()}, {packages}, {platform.machine()}"


def print_peaks(reports: dict[str, dict[str, Any]]) -> bool:
    """Predicted beside measured device peak of each job; whether all are within bounds."""
    print("| job | predicted MiB | measured MiB | error | step s predicted | measured |")
    print("|---|---|---|---|---|---|")
    held = True
    for name, report in reports.items():
        predicted, measured = peak(report["predicted"]), peak(report["measured"])
        error = (predicted - measured) / measured
        held &= 0 <= error <= ALLOWED_ERROR
        seconds = report["step_seconds"]
        print(
            f"| {name} | {predicted / 2**20:.1f} | {measured / 2**20:.1f} | {error:+.2%} "
            f"| {seconds['predicted']:.2f} | {seconds['measured']:.2f} |"
        )
    print(f"\nwithin {ALLOWED_ERROR:.0%} and never below: {'yes' if held else 'NO'}\n")
    return held


def peak(table: dict[str, dict[str, dict[str, int]]]) -> int:
    """Highest device total over the phases."""
    return max(sum(tiers.get("device", {}).values()) for tiers in table.values())


def print_trajectories(plain: dict[str, Any], planned: dict[str, Any]) -> bool:
    """Largest relative differences of loss and gradient norm; whether they are in tolerance."""
    worst = {}
    for key in ("loss", "grad_norm"):
        pairs = zip(plain["steps"], planned["steps"], strict=True)
        worst[key] = max(abs(a[key] - b[key]) / abs(a[key]) for a, b in pairs)
    losses = [[e["loss"] for e in report["evaluations"]] for report in (plain, planned)]
    print("| | plain | planned | largest relative difference over the steps |")
    print("|---|---|---|---|")
    first, last = plain["steps"][0], plain["steps"][-1]
    other_first, other_last = planned["steps"][0], planned["steps"][-1]
    print(
        f"| loss, first and last step | {first['loss']:.6f}, {last['loss']:.6f} "
        f"| {other_first['loss']:.6f}, {other_last['loss']:.6f} | {worst['loss']:.1e} |"
    )
    print(
        f"| gradient norm | {first['grad_norm']:.5f}, {last['grad_norm']:.5f} "
        f"| {other_first['grad_norm']:.5f}, {other_last['grad_norm']:.5f} "
        f"| {worst['grad_norm']:.1e} |"
    )
    print(
        f"| held-out loss before and after | {losses[0][0]:.6f}, {losses[0][-1]:.6f} "
        f"| {losses[1][0]:.6f}, {losses[1][-1]:.6f} | |"
    )
    held = worst["loss"] <= TOLERANCE
    print(
        f"\nlosses equal to {TOLERANCE:.0e} over {len(plain['steps'])} steps: "
        f"{'yes' if held else 'NO'}"
    )
    return held


if __name__ == "__main__":
    sys.exit(main())
