"""Every way to share a model out against one process: 20 steps on real processes, and their bytes.

Each row is a mode (what ranks share) with a model, or with a technique beside it: the runs of
`tests/engine/sharded_runs.py` on gloo, the same global batches on one process, and every rank's
dry run on fake tensors. Rows are kept in `results/modes.json` as they are made and not made again;
then `results/modes.md` is written, and the short table of `docs/parallelism.md`.

    OMP_NUM_THREADS=1 python benchmarks/modes.py               # what is missing
    OMP_NUM_THREADS=1 python benchmarks/modes.py TP "TP + PP"  # what is missing of some modes
    python benchmarks/modes.py --page                          # only the pages

About half an hour on two cores for all of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from modes_page import long_page, short_table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.engine import sharded_runs as runs  # noqa: E402

from tightfit.dry_run import dry_run  # noqa: E402
from tightfit.engine.quantisation import import_library  # noqa: E402
from tightfit.facts.workload import Workload  # noqa: E402
from tightfit.policies import Tier  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- benchmarks/modes.py writes from here -->", "<!-- to here -->"
STEPS = 20
PHASES = ("forward", "backward", "step")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", help="only these; all by default")
    parser.add_argument("--page", action="store_true", help="write the pages, run nothing")
    arguments = parser.parse_args()
    path = RESULTS / "modes.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    for mode in () if arguments.page else arguments.modes or runs.MODES:
        made = {(row["mode"], row["beside"]) for row in rows}
        missing = [words for words in rows_of(mode) if (mode, words) not in made]
        for some in in_order(mode, missing):
            # torch remembers groups of ranks by name, and ranks are forked with what it remembers.
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                rows += fresh.submit(measured, mode, some).result()
            rows.sort(key=lambda row: (list(runs.MODES).index(row["mode"]), place(row)))
            path.write_text(json.dumps({**made_by(), "rows": rows}, indent=1) + "\n")
    results = json.loads(path.read_text())
    (RESULTS / "modes.md").write_text(long_page(results))
    before, _, after = DOCUMENT.read_text().partition(BEGIN)
    after = after.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{short_table(results)}{END}{after}")


def made_by() -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "versions": f"torch {version('torch')}, transformers {version('transformers')}",
        "machine": f"{platform.system()} {platform.machine()}, python {platform.python_version()}",
    }


def rows_of(mode: str) -> list[str]:
    """Models, then techniques with the first of them. Pipelines have four micro-batches anyway."""
    ways = [way for way in runs.WAYS if not (way == "accumulate" and "four" in runs.MODES[mode][1])]
    return [*runs.MODELS.values(), *ways]


def place(row: Row) -> int:
    return rows_of(row["mode"]).index(row["beside"])


def in_order(mode: str, words: list[str]) -> list[list[str]]:
    """Those that take as many ranks together: they are started once."""
    ranks: dict[int, list[str]] = {}
    for word in words:
        ranks.setdefault(runs.of_mode(mode, word)[0], []).append(word)
    return list(ranks.values())


def every_rank(case: str, ranks: int) -> dict[int, str]:
    """All are faked, not only the first of each stage."""
    return {rank: f"fake {rank}" for rank in range(ranks)}


def measured(mode: str, beside: list[str]) -> list[Row]:
    """Run and compare."""
    runs.STEPS = STEPS
    runs.fake_names = every_rank
    cases = {words: runs.of_mode(mode, words) for words in beside}
    ranks = next(iter(cases.values()))[0]
    print(f"{mode}: {ranks} ranks, {', '.join(beside)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs.main(Path(folder), {ranks: [case for _, case in cases.values()]})
        return [
            {
                "mode": mode,
                "beside": words,
                "ranks": ranks,
                **differences(Path(folder), ranks, case),
                **device_bytes(Path(folder), ranks, case),
            }
            for words, (_, case) in cases.items()
        ]


def read(folder: Path, ranks: int, case: str, who: str) -> tuple[Any, dict[str, torch.Tensor]]:
    name = runs.file_name(case, ranks, who)
    saved = load_file(folder / f"{name}.safetensors")
    return json.loads((folder / f"{name}.json").read_text()), saved


def differences(folder: Path, ranks: int, case: str) -> Row:
    """From one process: losses and norms, relative, of the first step and of all; parameters at the
    end, absolute."""
    alone, expected = read(folder, ranks, case, "alone")
    sharding = runs.policies_of(case, ranks).sharding
    found = [read(folder, ranks, case, str(rank)) for rank in range(ranks)]
    first_stage = range(0, ranks // sharding.pipeline_parallel, sharding.tensor_parallel)
    losses = [sum(found[rank][0]["losses"][step] for rank in first_stage) for step in range(STEPS)]
    norms = [own["norms"] for own, _ in found]
    compared = [
        (value.float() - expected[name].float()).abs().max().item()
        for _, parameters in found
        for name, value in parameters.items()
        if value.is_floating_point()
    ]
    return {
        "loss": most_relative(losses, alone["losses"]),
        "norm": max(most_relative(own, alone["norms"]) for own in norms),
        "step_1_loss": most_relative(losses[:1], alone["losses"][:1]),
        "step_1_norm": max(most_relative(own[:1], alone["norms"][:1]) for own in norms),
        "parameters": max(compared),
        "first_loss": alone["losses"][0],
        "last_loss": alone["losses"][-1],
    }


def most_relative(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def device_bytes(folder: Path, ranks: int, case: str) -> Row:
    """Of the fullest rank, and how far every rank's bill is from it: the farthest.

    gloo's thread may hold a buffer for a moment after it is done with, so that of steps that are
    alike the lowest count is that of the program.
    """
    rest, peak = [], []
    for rank in range(ranks):
        real, _ = read(folder, ranks, case, str(rank))
        fake, _ = read(folder, ranks, case, f"fake {rank}")
        later = [real["tables"][str(step)] for step in range(runs.UNUSUAL + 1, STEPS)]
        rest.append((min(real["rest"][runs.UNUSUAL + 1 :]), fake["rest"][-1]))
        lowest = [min(on_device(table, phase) for table in later) for phase in PHASES]
        billed = fake["tables"][str(runs.FAKE_STEPS - 1)]
        peak.append((max(lowest), max(on_device(billed, phase) for phase in PHASES)))
    policies = runs.policies_of(case, ranks)
    workload = Workload(runs.LENGTH, policies.global_batch_size)
    bill = dry_run(runs.config_of(case.split()), policies, workload)
    fullest = max(found for found, _ in peak)
    return {
        "rest_bytes": max(found for found, _ in rest),
        "peak_bytes": fullest,
        "rest_error": farthest(rest),
        "peak_error": farthest(peak),
        "dry_run_error": max(bill.table.phase_peak_bytes(phase, Tier.DEVICE) for phase in PHASES)
        / fullest
        - 1,
    }


def on_device(table: dict[str, Any], phase: str) -> int:
    return sum(table[phase].get("device", {}).values())


def farthest(pairs: list[tuple[int, int]]) -> float:
    return max((billed / found - 1 for found, billed in pairs), key=abs)


if __name__ == "__main__":
    import_library()
    main()
