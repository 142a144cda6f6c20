"""Published memory of real runs with other engines, beside what tightfit predicts for them.

    python benchmarks/published.py [CASES.jsonl] > benchmarks/results/published.md

Predictions never see the published figure: a row's words become an `OtherRun`
(`published_rows.py`), its bill comes from the engine's closed forms and a plain step on fake
tensors. Takes about eight minutes on one core; the same on every machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from published_rows import OutOfScope, Row, describe, megatron_model
from published_why import explain
from tightfit.bill.other_engines import Metric, OtherEngine, OtherRun
from tightfit.bill.other_megatron import megatron_bytes
from tightfit.bill.runtime import runtime_bytes
from tightfit.dry_run.config import load_config
from tightfit.dry_run.other_engines import other_bill
from tightfit.errors import TightfitError
from tightfit.units import GIB

CASES = Path(__file__).parent.parent / "tests" / "cases" / "published_memory.jsonl"
ALLOWED_ERROR = 0.1
# What a row of contradicting sizes can raise out of transformers or torch.
_UNPRICED = (TightfitError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Prediction:
    """What tightfit says of a row.

    Attributes:
        gib: of the row's metric; None where the row is out of scope, which `why_none` says.
        kinds: GiB by kind at the peak.
        assumed: what the row leaves open and what was taken in its place.
    """

    gib: float | None
    metric: str = ""
    moment: str = ""
    kinds: dict[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    why_none: str = ""


def predict_row(row: Row) -> Prediction:
    """The prediction for any row; one that cannot be priced says why."""
    try:
        described = describe(row)
        run = described.run
        if run.engine is OtherEngine.MEGATRON:
            gib, moment, kinds = _megatron(row, run)
        else:
            config = json.dumps(described.config.to_dict(), default=str, sort_keys=True)
            gib, moment, kinds = _dry(described.config.model_type, config, run)
    except OutOfScope as reason:
        return Prediction(None, why_none=str(reason))
    except _UNPRICED as error:
        return Prediction(None, why_none=f"cannot be priced: {' '.join(str(error).split())[:120]}")
    return Prediction(gib, run.metric, moment, kinds, tuple(described.assumed))


@cache
def _dry(model_type: str, config: str, run: OtherRun) -> tuple[float, str, dict[str, float]]:
    bill = other_bill(load_config(json.loads(config)), run)
    kinds = {kind.value: size / GIB for kind, size in bill.moments[bill.peak_moment].items()}
    kinds["workspaces"] = bill.workspace_bytes / GIB
    if run.metric is not Metric.ALLOCATED:
        kinds["allocator"] = bill.fragmentation_bytes / GIB
    return bill.peak_bytes(run.metric) / GIB, bill.peak_moment, kinds


def _megatron(row: Row, run: OtherRun) -> tuple[float, str, dict[str, float]]:
    moments = megatron_bytes(megatron_model(row), run)
    moment, kinds = max(moments.items(), key=lambda item: sum(item[1].values()))
    runtime = runtime_bytes(run.capability, ranks=row.get("world_size") or 8)
    total = sum(kinds.values()) + runtime.workspace_bytes
    if run.metric is Metric.DEVICE:
        total += runtime.outside_bytes
    sizes = {kind.value: size / GIB for kind, size in kinds.items()}
    return total / GIB, moment, sizes | {"workspaces": runtime.workspace_bytes / GIB}


@dataclass(frozen=True)
class Line:
    """A row, what was predicted, and the error as a share of the published figure."""

    row: Row
    prediction: Prediction
    error: float | None

    @property
    def source(self) -> str:
        """The repository, or the address, that published it."""
        named = self.row.get("source_repo") or self.row.get("source_issue")
        return str(named or self.row.get("source_url") or "").removeprefix("https://github.com/")


def compare(rows: Iterable[Row]) -> list[Line]:
    """Predict all rows."""
    lines = []
    for row in rows:
        prediction = predict_row(row)
        error = _error(row, prediction.gib) if prediction.gib else None
        lines.append(Line(row, prediction, error))
    return lines


def _error(row: Row, gib: float) -> float:
    """As a share of the published figure; of the nearer end where its unit is GB or GiB."""
    low, high = row.get("peak_gib_range") or (row["peak_gpu_mem_gib"],) * 2
    return gib / min(max(gib, low), high) - 1


def main(arguments: list[str]) -> int:
    """Print the report."""
    warnings.simplefilter("ignore")
    path = Path(arguments[0]) if arguments else CASES
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    lines = compare(rows)
    print(report(lines))
    return 0


def report(lines: list[Line]) -> str:
    """All tables, in Markdown."""
    measured = [line for line in lines if line.error is not None]
    left_out = [line for line in lines if line.error is None]
    parts = [
        "# Published memory beside tightfit's prediction",
        _summary(measured, left_out),
        _table("By source", measured, lambda line: line.source),
        _table(
            "By completeness of the source",
            measured,
            lambda line: line.row.get("completeness", "?"),
        ),
        _table("By metric", measured, lambda line: line.prediction.metric),
        _rows(measured),
        _left_out(left_out),
    ]
    return "\n\n".join(parts)


def _summary(measured: list[Line], left_out: list[Line]) -> str:
    errors = [line.error for line in measured if line.error is not None]
    within = sum(abs(error) <= ALLOWED_ERROR for error in errors)
    return (
        "Predictions come from `benchmarks/published.py`; none is made from its row's own figure. "
        "A few habits of other programs, which no source states, were inferred from sets of "
        "published figures and hold for all rows of that program: what litgpt's layers keep "
        "(`keeps_inputs`, `keeps_mlp_product`), that DeepSpeed's stage 3 keeps gathered weights "
        "without recomputation, when prime-rl's gradients leave, and Megatron's 128 ranks. For "
        "those programs agreement says less. Explanations are given by rule, from what the source "
        "leaves open; 'reserved' ones say what kind of thing is missing, not how much. GiB per "
        "card; the error is predicted / published - 1. A published figure is compared with the "
        "metric that its source used; where its G may be GB or GiB, with the nearer of the two. "
        "Where a source leaves something open, the last column says what was assumed.\n\n"
        f"- rows priced: {len(errors)}; left out: {len(left_out)} (listed at the end)\n"
        f"- median of the error's size: {statistics.median(map(abs, errors)):.1%}\n"
        f"- within 10%: {within} ({within / len(errors):.0%}); "
        f"predicted below published: {sum(error < 0 for error in errors)}"
    )


def _table(title: str, lines: list[Line], key: Any) -> str:
    groups: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        groups[key(line)].append(line.error or 0.0)
    out = [f"## {title}", "", "| | rows | median size | median | within 10% | below |"]
    out.append("|---|---|---|---|---|---|")
    for name, errors in sorted(groups.items(), key=lambda item: -len(item[1])):
        within = sum(abs(error) <= ALLOWED_ERROR for error in errors)
        out.append(
            f"| {name} | {len(errors)} | {statistics.median(map(abs, errors)):.1%} "
            f"| {statistics.median(errors):+.1%} | {within} | {sum(e < 0 for e in errors)} |"
        )
    return "\n".join(out)


def _rows(lines: list[Line]) -> str:
    out = ["## Rows", "", "| row | settings | metric | published | predicted | error | notes |"]
    out.append("|---|---|---|---|---|---|---|")
    for line in sorted(lines, key=lambda line: (line.source, line.row["id"])):
        error = line.error or 0.0
        notes = (
            [f"assumed: {'; '.join(line.prediction.assumed)}"] if line.prediction.assumed else []
        )
        if abs(error) > ALLOWED_ERROR:
            notes.insert(0, explain(line.row))
        out.append(
            f"| {line.row['id']} | {_settings(line.row)} | {line.prediction.metric} "
            f"| {_published(line.row)} | {line.prediction.gib:.2f} | {error:+.1%} "
            f"| {'. '.join(notes)} |"
        )
    return "\n".join(out)


def _published(row: Row) -> str:
    ends = row.get("peak_gib_range") or (row["peak_gpu_mem_gib"],)
    return "-".join(f"{end:.2f}" for end in ends)


def _settings(row: Row) -> str:
    ranks = [f"{name}{row[name]}" for name in ("dp", "tp", "pp", "cp") if (row.get(name) or 1) > 1]
    engine = row.get("fsdp") if row.get("fsdp") not in (None, "none") else ""
    if row.get("zero_stage"):
        engine = f"ZeRO-{row['zero_stage']}"
    words = [
        str(row.get("method") or ""),
        str(engine or ""),
        f"{row.get('world_size') or '?'} ranks",
        " ".join(ranks),
        f"{row.get('micro_batch') or '?'} x {row.get('seq_len') or '?'}",
        f"recompute {row.get('gradient_checkpointing') or '?'}"[:40],
    ]
    return ", ".join(word for word in words if word).replace("|", "/")


def _left_out(lines: list[Line]) -> str:
    out = ["## Left out", "", "| row | why |", "|---|---|"]
    out += [f"| {line.row['id']} | {line.prediction.why_none} |" for line in lines]
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
