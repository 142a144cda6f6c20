"""The pages of modes.py's results: a row for each run, and the worst of each mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
NAMES = {
    "untied": "Llama",
    "qwen2": "Qwen2, tied",
    "moe untied": "Qwen3-MoE",
    "smollm2": "SmolLM2",
    "checkpoint": "checkpointing",
    "accumulate": "2 micro-batches",
    "lora": "LoRA",
    "wide qlora": "QLoRA",
    "host": "states on the host",
    "away": "all on the host, lazy step",
    "bf16": "bf16",
}
MODELS = ("untied", "qwen2", "moe untied", "smollm2")
# Relative, of losses and of norms, over all steps. What they differ by in the first grows with each
# step, most in the deepest models.
TOLERANCES = {"fp32": (1e-5, 5e-4), "bf16": (5e-3, 2e-1)}
# In bf16 a partial sum is rounded before it is added to others, by 2e-3 of itself at most, up or
# down: a loss and a norm of many such values are nearer than that. So the first step, where all
# have the same parameters, says whether the sums are right; later ones, that nothing comes to harm.
FIRST_STEP_BF16 = (5e-5, 1e-3)
BYTES, FEW_BYTES = 0.03, 64

INTRODUCTION = """# Every mode against one process

{date}, {versions}, {machine}; real processes on gloo, one thread each. `python benchmarks/modes.py`
says how to make it again; do not edit.

Models have three layers of width 16 (SmolLM2's 9 query and 3 key heads: width 36, tensor groups of
3; QLoRA: 256) and a vocabulary of 61, which no number of ranks divides. 20 steps of AdamW with
clipping; one process takes the same global batch as one micro-batch. Interleaved stages have
six layers. Differences grow with each step: norms of the first one agree to 1e-6, in bf16 losses to
{first_loss:.0e} and norms to {first_norm:.0e}. Techniques are tried on a tied Llama.

- loss, norm: the largest relative difference of any step, norms of any rank; parameters: the
  largest absolute difference after the last step, of any rank.
- rest, peak: device bytes of the fullest rank between steps and at the highest moment of a step,
  by the ledger. Its columns of errors: (bill - measured) / measured, the farthest of all ranks,
  each with a dry run of its own; *dry run*: of the whole bill, for the fullest rank.
- within: loss {loss:.0e}, norm {norm:.0e}, in bf16 {bf16_loss:.0e} and {bf16_norm:.0e}, but in its
  first step {first_within}; bytes {bytes:.0%}, or {few_bytes} of them.
"""


def long_page(results: dict[str, Any]) -> str:
    """Markdown, with a row for each run."""
    narrow = [row for row in results["rows"] if row["beside"] == "bf16"]
    head = INTRODUCTION.format(
        **results,
        loss=TOLERANCES["fp32"][0],
        norm=TOLERANCES["fp32"][1],
        bf16_loss=TOLERANCES["bf16"][0],
        bf16_norm=TOLERANCES["bf16"][1],
        first_loss=max(row["step_1_loss"] for row in narrow),
        first_norm=max(row["step_1_norm"] for row in narrow),
        first_within=" and ".join(f"{tolerance:.0e}" for tolerance in FIRST_STEP_BF16),
        bytes=BYTES,
        few_bytes=FEW_BYTES,
    )
    return "\n".join([head, *_long_table(results["rows"])]) + "\n"


def _long_table(rows: list[Row]) -> Iterator[str]:
    yield (
        "| mode | ranks | model or technique | loss | norm | parameters | rest | bill "
        "| peak | bill | dry run | within |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['mode']} | {row['ranks']} | {NAMES[row['beside']]} | {row['loss']:.0e} "
            f"| {row['norm']:.0e} | {row['parameters']:.0e} | {row['rest_bytes']:,} "
            f"| {row['rest_error']:+.2%} | {row['peak_bytes']:,} | {row['peak_error']:+.2%} "
            f"| {row['dry_run_error']:+.2%} | {'yes' if is_within(row) else 'NO'} |"
        )


def short_table(results: dict[str, Any]) -> str:
    """Markdown: the worst of each mode over its models, and of each technique over the modes."""
    rows = results["rows"]
    lines = [
        "| mode (4 models) | ranks | loss | norm | bytes at rest | at peak | whole bill |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode and row["beside"] in MODELS]
        lines.append(f"| {mode} | {_ranks(of_mode)} | {_worst(of_mode)} |")
    lines += [
        "",
        "| technique | modes | loss | norm | bytes at rest | at peak | whole bill |",
        "|---|---|---|---|---|---|---|",
    ]
    for words in NAMES:
        with_it = [row for row in rows if row["beside"] == words]
        if words not in MODELS and with_it:
            lines.append(f"| {NAMES[words]} | {len(with_it)} | {_worst(with_it)} |")
    return "\n".join(lines) + "\n"


def _ranks(rows: list[Row]) -> str:
    return ", ".join(str(ranks) for ranks in sorted({row["ranks"] for row in rows}))


def _worst(rows: list[Row]) -> str:
    numbers = [f"{max(row[key] for row in rows):.0e}" for key in ("loss", "norm")]
    errors = [
        f"{max((row[key] for row in rows), key=abs):+.2%}"
        for key in ("rest_error", "peak_error", "dry_run_error")
    ]
    return " | ".join([*numbers, *errors])


def is_within(row: Row) -> bool:
    """Whether a row is as equal as it should be."""
    loss, norm = TOLERANCES["bf16" if row["beside"] == "bf16" else "fp32"]
    errors = (("rest", "rest"), ("peak", "peak"), ("dry_run", "peak"))
    return (
        row["loss"] <= loss
        and row["norm"] <= norm
        and (row["beside"] != "bf16" or _is_first_step_within(row))
        and all(
            abs(row[f"{error}_error"]) * row[f"{of}_bytes"]
            <= max(BYTES * row[f"{of}_bytes"], FEW_BYTES)
            for error, of in errors
        )
    )


def _is_first_step_within(row: Row) -> bool:
    loss, norm = FIRST_STEP_BF16
    return bool(row["step_1_loss"] <= loss and row["step_1_norm"] <= norm)
