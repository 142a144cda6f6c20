"""Writes docs/accuracy.md from what the grid and the other estimators have left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_grid import LEVELS, Row
from accuracy_results import (
    ALLOWED_ERROR,
    PEERS,
    Guess,
    Peer,
    Result,
    error_of,
    read_grid,
    read_peers,
    total_holds,
)
from accuracy_runs import STEPS

PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"
UNIMPORTANT = 1e-4
WORST = 3  # rows whose kinds are shown

INTRODUCTION = f"""# How accurate the bill is

Written by `benchmarks/accuracy.py`, which says how to make it again; do not edit.

Every row is one real training run on real tensors beside the bill that was made of it: {STEPS}
optimizer steps and an evaluation, counted by the ledger, in as many processes as there are ranks
(gloo, one thread each; a collective counts as over when gloo's own threads have let go of its
buffers). The bill is the dry run of a few layers, extrapolated to all, with its
margin of 1%; it knows nothing of the run. Weights are random, shapes are not: SmolLM2-135M has its
published architecture, the others are small (8 or 12 layers, hidden size 64).

Compared are forward, backward, step and eval on every tier, and with one rank load and init too; of
several ranks the highest counts. *Error* is (predicted - measured) / measured of the device's
peak, *phases* the lowest and the highest error among all phases and tiers. A row holds if none of
these is below 0 or above {ALLOWED_ERROR:.0%}.

The rows cover every pair of settings that can go together, and then as many triples as a hundred
rows can. Left out: chunked loss and torch's attention with Gemma 2, which caps logits and scores;
16 bits with 135M parameters, which take minutes on a CPU without 16-bit arithmetic.
"""

NOT_COVERED = """## What this does not show

- No GPU was used: the ledger counts the tensors of a program on a CPU. What a card's kernels, its
  allocator and its context take is added to the bill of a card by other means.
  `tests/gpu/test_bill_cuda.py` compares that with `torch.cuda.max_memory_allocated` and
  `max_memory_reserved`; it has not run on hardware yet.
- What a kernel allocates inside itself is not seen by the ledger, and not in these bills.
- How several ranks come by their model; saving and resuming.
- What the engine does not do yet and bills price by closed forms: 8-bit bases, Adafactor on parts.
"""

PEERS_EXPLAINED = """## Other estimators on the same rows

Errors are against the device's peak; *below* is by more than a ten-thousandth. *Described* are the
rows that the estimator says it is for; *all answered* adds those for which it gives a number
without hearing of what differs.

- accelerate's `estimate-memory` ("training using Adam", batch size 1) is described by full
  fine-tuning with everything on the device of one rank, or of several that share nothing.
- DeepSpeed's `estimate_zero2_model_states_mem_needs` (for stages 1 and 2; its own is 2) and
  `estimate_zero3_model_states_mem_needs` are for 16-bit full fine-tuning with its own engine; with
  states on the host, their figure with `cpu_offload`. They count model states only, so they are
  also laid beside what lives of parameters, gradients, master weights and optimizer states.
- torch's `MemTracker` (one rank) and `FSDPMemTracker` (several), under `FakeTensorMode`: around a
  plain torch loop with FSDP2 and fused AdamW, for fp32 rows that plain torch can run; and around
  tightfit's own engine at full depth, the very program that was measured, where the optimizer is on
  the device (they do not tell tiers apart on a CPU). `MemTracker` fails on frozen parameters
  ("cannot register a hook on a tensor that doesn't require gradient").
"""


def write_page() -> None:
    """Write docs/accuracy.md."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """docs/accuracy.md, from both files of results."""
    circumstances, results = read_grid()
    parts = [
        INTRODUCTION,
        _circumstances(circumstances),
        _summary(results),
        _faults(results),
        _rows(results),
        _kinds(results),
        _peers(results) if PEERS.exists() else "",
        NOT_COVERED,
    ]
    return "\n".join(part for part in parts if part)


def _circumstances(data: dict[str, Any]) -> str:
    return f"{data['date']}, {data['machine']}, {data['cores']} cores, {_versions(data)}.\n"


def _versions(data: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in data["versions"].items())


def _summary(results: list[Result]) -> str:
    ran = [result for result in results if result.outcome is not None]
    errors = [result.error for result in ran]
    totals = [error_of(total) for result in ran for total in result.totals]
    seconds = median(result.ran.predicted_seconds for result in ran)
    figures = [
        ("rows", str(len(results))),
        ("rows that hold", str(sum(result.holds for result in results))),
        ("rows that failed to run", str(len(results) - len(ran))),
        ("error of the device's peak, median", f"{median(errors):+.2%}"),
        ("lowest and highest", f"{min(errors):+.2%}, {max(errors):+.2%}"),
        ("phases and tiers compared", str(len(totals))),
        ("lowest and highest error of them", f"{min(totals):+.2%}, {max(totals):+.2%}"),
        (
            "rows right to the byte in all of them, the margin left out",
            str(sum(result.is_exact for result in ran)),
        ),
        ("seconds for a bill, median, nothing cached", f"{seconds:.1f}"),
    ]
    by_setting = _table(("setting", "", "rows", "lowest error", "highest error"), _by_setting(ran))
    return "\n".join(["## Summary\n", *_table(("", ""), figures), "", *by_setting, ""])


def _by_setting(ran: list[Result]) -> Iterator[tuple[str, ...]]:
    for factor, levels in LEVELS.items():
        for level in levels:
            own = [result for result in ran if getattr(result.row, factor) == level]
            if own:
                yield (
                    factor.replace("_", " "),
                    own[0].row.sharing if factor == "ranks" else str(level),
                    str(len(own)),
                    f"{min(result.span[0] for result in own):+.2%}",
                    f"{max(result.span[1] for result in own):+.2%}",
                )


def _faults(results: list[Result]) -> str:
    lines = []
    for number, result in enumerate(results, 1):
        if result.outcome is None:
            lines.append(f"- row {number}: {result.failed}")
            continue
        lines += [
            f"- row {number}: {total.phase}, {total.tier}: predicted "
            f"{total.predicted_bytes:,} bytes, measured {total.measured_bytes:,}"
            for total in result.totals
            if not total_holds(total)
        ]
    return "\n".join(["## Rows that do not hold\n", *lines, ""]) if lines else ""


def _rows(results: list[Result]) -> str:
    header = (
        *(
            "",
            "model",
            "tuning",
            "ranks",
            "type",
            "checkpoint",
            "loss",
            "batch",
            "tokens",
            "states",
            "attention",
        ),
        *("predicted MiB", "measured MiB", "error", "phases"),
    )
    lines = (
        (str(number), *_settings(result.row), *_figures(result))
        for number, result in enumerate(results, 1)
    )
    note = (
        "*checkpoint* is every how manieth layer is recomputed, *batch* micro-batch x accumulation "
        "steps, *tokens* those of a sequence, *states* the tier of gradients and optimizer.\n"
    )
    return "\n".join(["## All rows\n", note, *_table(header, lines), ""])


def _settings(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.tuning,
        row.sharing,
        row.precision,
        row.checkpointing,
        row.loss,
        f"{row.micro_batch} x {row.accumulation}",
        str(row.sequence),
        row.optimizer,
        row.attention,
    )


def _figures(result: Result) -> tuple[str, ...]:
    if result.outcome is None:
        return ("failed", "", "", "")
    predicted, measured = result.peaks_bytes
    low, high = result.span
    span = f"{low:+.2%} .. {high:+.2%}"
    return (_mib(predicted), _mib(measured), f"{result.error:+.2%}", span)


def _kinds(results: list[Result]) -> str:
    """The kinds of those whose worst phase is farthest from the margin."""
    ran = [pair for pair in enumerate(results, 1) if pair[1].outcome is not None]
    ran.sort(key=lambda pair: -max(map(_off, pair[1].totals)))
    parts = ["## The worst rows by kind\n"]
    for number, result in ran[:WORST]:
        worst = max(result.totals, key=_off)
        differences = result.ran.predicted.diff(result.ran.measured)
        own = [d for d in differences if (d.phase, d.tier) == (worst.phase, worst.tier)]
        header = (f"row {number}: {worst.phase}, {worst.tier}", "predicted bytes", "measured bytes")
        lines = (
            (d.kind or "total", f"{d.predicted_bytes:,}", f"{d.measured_bytes:,}") for d in own
        )
        parts += [*_table(header, lines), ""]
    return "\n".join(parts)


def _off(total: Any) -> float:
    """How far an error is from the margin, which is what an exact bill has."""
    return abs(error_of(total) - 0.01)


def _peers(results: list[Result]) -> str:
    circumstances, peers = read_peers(results)
    own = [
        Guess(result.error, result.ran.predicted_seconds)
        for result in results
        if result.outcome is not None
    ]
    lines = [("tightfit", "all", *_guesses(own), str(len(results) - len(own)))]
    for peer in peers:
        lines += _lines_of_peer(peer)
    header = (
        *("estimator", "rows", "covered", "median error", "lowest", "highest"),
        *("below", "seconds each, median", "failed"),
    )
    made = f"{circumstances['date']}, {_versions(circumstances)}.\n"
    return "\n".join([PEERS_EXPLAINED, *_table(header, lines), "", made])


def _lines_of_peer(peer: Peer) -> Iterator[tuple[str, ...]]:
    for rows, guesses in peer.guesses.items():
        if guesses:
            yield (peer.name, rows, *_guesses(guesses), str(peer.failed))


def _guesses(guesses: list[Guess]) -> tuple[str, ...]:
    errors = [guess.error for guess in guesses]
    return (
        str(len(errors)),
        f"{median(abs(error) for error in errors):.1%}",
        f"{min(errors):+.1%}",
        f"{max(errors):+.1%}",
        f"{sum(error < -UNIMPORTANT for error in errors) / len(errors):.0%}",
        f"{median(guess.seconds for guess in guesses):.1f}",
    )


def _table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    names = list(header)
    return [
        f"| {' | '.join(names)} |",
        f"|{'---|' * len(names)}",
        *(f"| {' | '.join(cells)} |" for cells in lines),
    ]


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:.2f}"
