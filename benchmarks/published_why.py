"""Why a prediction is off by more than a tenth: what the source leaves open, or a fault of ours.

Rules are tried in order; each says what can be checked in the row or in the source it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from published_words import Row, text

Rule = tuple[Callable[[Row], bool], str]


def _has(pattern: str, *names: str) -> Callable[[Row], bool]:
    return lambda row: bool(re.search(pattern, text(row, *names)))


_SOURCE = ("source_repo", "source_issue", "source_url")

_RULES: tuple[Rule, ...] = (
    (
        lambda row: "below" in str(row.get("suspect_published")),
        "The published figure is below weights, gradients and AdamW's states together, as if the "
        "states were absent",
    ),
    (
        lambda row: bool(row.get("suspect_published")),
        "Suspect in the source: the shorter sequence is published above the longer one",
    ),
    (
        _has(r"^tune_8b_(q?lora)_4090", "id"),
        "The source's table does not state the batch; with one sample instead of the row's two the "
        "prediction agrees",
    ),
    (
        _has(r"^tune_8b_full_a6000|^tune_8b_lora_a6000", "id"),
        "The source leaves optimizer and checkpointing of this column open (the row's `unsure`)",
    ),
    (
        lambda row: not row.get("seq_len"),
        "The source states no sequence length; what was assumed decides the figure",
    ),
    (
        _has(r"osf", "method"),
        "OSF decomposes every matrix and keeps both factors; priced as LoRA, which it is not",
    ),
    (
        _has(r"adapter", "method"),
        "LLaMA-Adapters are priced as LoRA of rank 8 that keeps linear layers' outputs too",
    ),
    (
        lambda row: "litgpt" in text(row, *_SOURCE) and "nf4" in text(row, "weights_dtype"),
        "What litgpt's layers around bitsandbytes keep for backward is inferred (an fp32 copy of "
        "each product's input), not read: a fault of ours where it is too much or too little",
    ),
    (
        _has(r"megatron_gpt3_mcore_tp1_pp2_h100", "id"),
        "The attention kernel is said to be automatic in deterministic mode; with unfused scores "
        "the prediction is 3.3",
    ),
    (
        _has(r"^dse_bf16master_254m", "id"),
        "The model is DeepSpeedExamples' own (post-norm, weights of attention returned); OPT's "
        "modules, which stand for it, keep less beside the scores",
    ),
    (
        _has(r"4xa6000", "id"),
        "Recorded when later defaults were probably on (see the row's `unsure`: states and "
        "activations offloaded)",
    ),
    (
        _has(r"^dse192", "id"),
        "nvidia-smi on Megatron-LM 1.1.5's own layers with swap buffers of unstated size; priced "
        "as GPT-2's layers under ZeRO-3",
    ),
    (
        _has(r"read off", "peak_metric"),
        "Read off a chart of the whole card, in GB or GiB; what loading left reserved is in it",
    ),
    (
        _has(r"pr3234", "id"),
        "Loss, checkpointing and what is offloaded when are not stated (completeness C)",
    ),
    (
        _has(r"sft", "id"),
        "A fault of ours, open: one more fp32 copy of the logits than the loss as described makes "
        "is missing",
    ),
    (
        _has(r"nvfp4", "id"),
        "Checkpointing and loss are not stated",
    ),
    (
        lambda row: "litgpt" in text(row, *_SOURCE) and (row.get("world_size") or 1) > 1,
        "The README's machine column and the config's `devices` differ, so the number of shards "
        "and whether gradients accumulate whole is open",
    ),
    (
        _has(r"1 gpu|seq_len_kind|cap", "seq_len_kind"),
        "The length is only a cap; the longest batch really seen is not published",
    ),
    (
        _has(r"^swift3_", "id"),
        "A rounded figure in a script's comment, whose tool is not stated; what Megatron offloads "
        "and keeps there is not described further",
    ),
    (
        _has(r"mean \d+ tokens", "seq_len_kind"),
        "Reserved memory of a run whose samples have every length up to the cap: blocks of many "
        "sizes pile up in an order that is not published; two dozen drawn lengths stand for it",
    ),
    (
        _has(r"qwenlm", *_SOURCE),
        "The source states neither tool nor unit, nor the DeepSpeed config that was used; short "
        "sequences differ by a constant, which is not activations",
    ),
    (
        _has(r"llama-cookbook", *_SOURCE),
        "Batch and length are assumed defaults; unlimited gathers (`limit_all_gathers` false) let "
        "layers pile up as the host runs ahead, which no bill can know",
    ),
    (
        lambda row: (row.get("pp") or 1) > 1 and "titan" in text(row, *_SOURCE),
        "The number of pipeline micro-batches is not stated",
    ),
    (
        lambda row: bool(row.get("fp8")),
        "fp8: its copies of weights and activations are not priced; dates differ in what the "
        "loss's compilation saves",
    ),
    (
        _has(r"fsdp_qlora", *_SOURCE),
        "Reserved memory left over from loading and quantising counts in the source (its allocated "
        "figures agree)",
    ),
    (
        _has(r"reserved", "peak_metric"),
        "Reserved memory: the allocator's losses of the real run, whose steps are not all alike",
    ),
    (
        lambda row: row.get("completeness") == "C",
        "The source leaves too much open (completeness C)",
    ),
)


def explain(row: Row) -> str:
    """The first reason that applies; says so where none does."""
    return next((reason for applies, reason in _RULES if applies(row)), "Not explained")
