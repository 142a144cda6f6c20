"""What the modules that read published rows share: a row's words, the model's family, scope."""

from __future__ import annotations

import re
from typing import Any

Row = dict[str, Any]


class OutOfScope(Exception):
    """The row is no measured device peak of a causal language model; says why."""


def text(row: Row, *names: str) -> str:
    """The fields' words together, in lower case; empty where none is stated."""
    return " ".join(str(row[name]) for name in names if row.get(name)).lower()


_FAMILIES: tuple[tuple[str, str], ...] = (
    (r"qwen3.*(a3b|a22b|moe)", "qwen3_moe"),
    (r"qwen3", "qwen3"),
    (r"qwen", "qwen2"),
    (r"mixtral", "mixtral"),
    (r"mistral", "mistral"),
    (r"gemma-?2-|gemma2", "gemma2"),
    (r"gemma", "gemma"),
    (r"phi-?[12]|phi-1_5", "phi"),
    (r"stablelm-base-alpha|pythia|neox", "gpt_neox"),
    (r"falcon", "falcon"),
    (r"opt-", "opt"),
    (r"bloom", "bloom"),
    (r"gpt2|gpt-2|gpt|megatron", "gpt2"),
    (r"learned pos", "opt"),
)


def family(row: Row) -> str:
    """The architecture in transformers; Llama's where the name says nothing else."""
    words = text(row, "model_hf_id") or text(row, "arch_desc")
    return next((kind for pattern, kind in _FAMILIES if re.search(pattern, words)), "llama")


def check_scope(row: Row) -> None:
    if not row.get("measured", True) or row.get("kind") == "estimate_do_not_use":
        raise OutOfScope("an estimate, not a measurement")
    if row.get("oom"):
        raise OutOfScope("out of memory: a bound, no figure")
    if not row.get("peak_gpu_mem_gib"):
        raise OutOfScope("no device peak published (time, host memory or context length)")
    words = text(row, "model_hf_id", "arch_note", "arch_desc")
    if re.search(r"t5|t0|bert|encoder|24 enc", words) or row.get("encoder_layers"):
        raise OutOfScope("not a causal language model")
    if "vision" in words or "timm" in words:
        raise OutOfScope("not a language model")
    if not row.get("arch_hidden") or not row.get("arch_layers"):
        raise OutOfScope("the source does not give the model's sizes")
