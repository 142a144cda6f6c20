"""Types, adapters and losses of published rows in the words of `OtherRun`."""

from __future__ import annotations

import re
from dataclasses import replace

from published_words import Row, family, text
from tightfit.bill.other_engines import Metric, OtherEngine, OtherLoss, Recompute, Widths
from tightfit.policies import AdapterPolicy

NF4 = 0.5 + 4 / 64  # an fp32 scale per 64 weights
NF4_DOUBLE = 0.5 + 1 / 64 + 4 / (64 * 256)  # scales in 8 bits, an fp32 one per 256 of them
GPTQ = 0.5 + (2 + 0.5) / 128  # an fp16 scale and a 4-bit zero point per 128 weights


# Types


def widths(row: Row, engine: OtherEngine, assumed: list[str]) -> Widths:
    stored = text(row, "weights_dtype") or "bf16"
    if not row.get("weights_dtype"):
        assumed.append("bf16 weights")
    compute = 4.0 if stored == "fp32" else 2.0
    sharded_masters = stored == "bf16 compute on gpu" and text(row, "offload") == "none"
    whole = stored.startswith("fp32") or "fp32 mixed" in stored or sharded_masters
    weight = 4.0 if whole else 2.0
    quantised = _quantised(text(row, "weights_dtype", "quantization", "method"))
    adapter = _adapter_width(row, assumed) if is_adapter(row) else None
    trained = weight if adapter is None else adapter
    gradient = _gradient_width(row, trained)
    states = _states_width(row, trained, engine, assumed)
    return Widths(
        weight=weight,
        compute=compute,
        gradient=gradient,
        reduce=4.0 if "reduce fp32" in text(row, "grads_dtype") else min(gradient, trained),
        master=0.0 if weight == 4 else _master_width(row, engine),
        states=states,
        step=states / 2 if _foreach(row, engine) else 0.0,
        adapter=adapter,
        quantised=quantised,
        keeps_unpacked=quantised == GPTQ,
    )


def _quantised(words: str) -> float | None:
    if "gptq" in words or "int4 (fp16" in words:
        return GPTQ
    if "nf4" in words or "bnb-int4" in words:
        stated = words.replace("no double quant", "")  # torchao always quantises its scales
        double = any(word in stated for word in ("dq", "double quant", "torchao"))
        return NF4_DOUBLE if double else NF4
    return 1.0 if "int8" in words else None


def _adapter_width(row: Row, assumed: list[str]) -> float:
    stated = text(row, "adapter_dtype")
    if stated:
        return 4.0 if stated.startswith("fp32") else 2.0
    if "fp32 likely" in text(row, "optimizer_states_dtype"):
        assumed.append("fp32 adapters")
        return 4.0
    assumed.append("adapters in bf16, as the base computes")
    return 2.0


def _gradient_width(row: Row, trained: float) -> float:
    stated = text(row, "grads_dtype", "main_grads_dtype")
    if not stated:
        return trained
    return 4.0 if stated.startswith("fp32") and "bf16 grad partitions" not in stated else 2.0


def _states_width(row: Row, trained: float, engine: OtherEngine, assumed: list[str]) -> float:
    stated, name = text(row, "optimizer_states_dtype"), text(row, "optimizer")
    if "paged" in stated or "paged" in name:
        return 0.0  # managed memory, which torch's counters do not see
    if "sgd" in name:
        return 0.0
    if "4-bit" in stated or "4bit" in name:
        return 2 * (0.5 + 4 / 128)
    if "8-bit" in stated or "8bit" in name:
        return 2 * (1 + 4 / 256)
    if stated.startswith("bf16"):
        return 4.0
    if stated.startswith("fp32"):
        return 8.0
    if engine in (OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3):
        return 8.0
    assumed.append("optimizer states in the type of what is trained")
    return 2 * trained


def _master_width(row: Row, engine: OtherEngine) -> float:
    stated = text(row, "master_weights_dtype")
    if stated:
        return 2.0 if stated.startswith("bf16") else 4.0
    zero = engine in (OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3)
    return 4.0 if zero else 0.0


def _foreach(row: Row, engine: OtherEngine) -> bool:
    """torch's AdamW updates all parameters at once unless it is fused."""
    name = text(row, "optimizer")
    if engine in (OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3, OtherEngine.MEGATRON):
        return False
    if re.search(r"(?<!un)fused(?!=false)|paged|bnb|8bit|4bit|galore|lomo|ao", name):
        return False
    return "adam" in name or not name


# Adapters

_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {
        "q": ("q_proj",),
        "k": ("k_proj",),
        "v": ("v_proj",),
        "o": ("o_proj",),
        "mlp": ("gate_proj", "up_proj", "down_proj"),
        "gate": ("gate_proj",),
        "up": ("up_proj",),
        "down": ("down_proj",),
        "head": ("lm_head",),
        "c_attn": ("q_proj", "k_proj", "v_proj"),
    },
    "phi": {
        "q": ("q_proj",),
        "k": ("k_proj",),
        "v": ("v_proj",),
        "o": ("dense",),
        "mlp": ("fc1", "fc2"),
        "head": ("lm_head",),
    },
    "gpt_neox": {
        "q": ("query_key_value",),
        "k": ("query_key_value",),
        "v": ("query_key_value",),
        "o": ("dense",),
        "mlp": ("dense_h_to_4h", "dense_4h_to_h"),
        "head": ("embed_out",),
    },
}
_TARGETS["falcon"] = _TARGETS["gpt_neox"] | {"head": ("lm_head",)}
_TARGETS["bloom"] = _TARGETS["falcon"]
_SAME = {
    "query": "q",
    "key": "k",
    "value": "v",
    "projection": "o",
    "out_proj": "o",
    "output": "head",
    "lm_head": "head",
    "w1": "gate",
    "w2": "up",
    "attn.c_proj": "o",
    "mlp.c_proj": "down",
    "query_key_value": "c_attn",
}


def is_adapter(row: Row) -> bool:
    return bool(re.search(r"lora|adapter|ln_tuning|osf|dora", text(row, "method")))


def adapter(row: Row, assumed: list[str]) -> AdapterPolicy | None:
    if not is_adapter(row):
        return None
    stated = row.get("lora_targets") or []
    stated = [stated] if isinstance(stated, str) else stated
    rank = row.get("lora_r") or 8
    if not row.get("lora_r"):
        assumed.append("adapters of LoRA's kind, rank 8")
    if not stated:
        assumed.append("adapters on q and v")
        stated = ["q", "v"]
    dropout = row.get("lora_dropout") or 0.0
    if row.get("arch_tied_embeddings") and "torchtune" in text(row, "source_repo"):
        # torchtune refuses adapters on an output layer that is the embedding
        stated = [name for name in stated if _SAME.get(str(name), name) != "head"]
    targets = _targets(family(row), [str(name) for name in stated])
    return AdapterPolicy(rank, 16, dropout, targets)


def _targets(kind: str, stated: list[str]) -> tuple[str, ...]:
    """The names of `kind`'s modules; none for all linear layers."""
    if any("all" in name for name in stated):
        return ()
    known = _TARGETS.get(kind, _TARGETS["llama"])
    found: dict[str, None] = {}
    for name in stated:
        short = name.split(" ")[0].removesuffix("_proj")
        for module in known.get(_SAME.get(short, short), ()):
            found[module] = None
    return tuple(found) or known["q"] + known["v"]


# What is computed again, the loss, the figure


def recompute(row: Row, assumed: list[str]) -> Recompute:
    words = text(row, "gradient_checkpointing")
    if not words or words.startswith("unknown"):
        assumed.append("gradient checkpointing " + ("off" if "none" in words else "on"))
        return Recompute.NONE if "none" in words else Recompute.FULL
    if words.startswith("none"):
        return Recompute.NONE
    if "every 2nd" in words:
        return Recompute.ALTERNATE
    return Recompute.SELECTIVE if words.startswith("selective") else Recompute.FULL


_LOSSES: tuple[tuple[str, OtherLoss], ...] = (
    (r"chunked lm_head", OtherLoss(upcast=False, head_chunks=0)),
    (r"full logits \+ chunked ce", OtherLoss(upcast=False)),
    (r"cewithchunked|chunked \(8", OtherLoss(head_chunks=8)),
    (r"fused lm head|liger|cut", OtherLoss(recompute_tokens=2048, fused=True)),
    (r"compiled ce|loss torch.compiled|(?<!un)fused ce", OtherLoss(fused=True, keep_logits=False)),
    (r"deleted before|eager ce|freed before", OtherLoss(keep_logits=False)),
    (r"hf causal-lm|upcast to fp32", OtherLoss()),
    (r"crossentropyloss on full logits", OtherLoss(upcast=False)),
    (r"full logits|hf ce", OtherLoss(shift_copy=True)),
)


def loss(row: Row, assumed: list[str]) -> OtherLoss:
    words = text(row, "loss_impl")
    found = next((how for pattern, how in _LOSSES if re.search(pattern, words)), None)
    if found is None and "prime-rl" in text(row, "source_repo", "source_issue"):
        assumed.append("the fused output layer, 2048 tokens at a time")
        return OtherLoss(recompute_tokens=2048, fused=True)
    if found is None:
        assumed.append("all logits at once, copied to fp32")
        found = OtherLoss(shift_copy=True)
    if re.search(
        r"trainer|adamw_torch|deepspeed adamw|swift", text(row, "optimizer", "source_repo")
    ):
        found = replace(found, keep_logits=False)  # Trainer drops the outputs before backward
    if found.head_chunks == 0:
        return replace(found, head_chunks=-(-(row.get("seq_len") or 2048) // 128))
    if found.head_chunks > 1 and "activations" in text(row, "offload"):
        return replace(found, offloaded=True, keep_logits=False)  # torchtune offloads all it keeps
    if found.head_chunks > 1 and row.get("compile"):
        return replace(found, fused=True)
    return found


def metric(row: Row, assumed: list[str]) -> Metric:
    words = text(row, "peak_metric")
    if (
        "nvml" in words.split("read off")[-1]
        or "nvidia-smi style" in words
        or words == "nvidia-smi"
    ):
        return Metric.DEVICE
    if "reserved" in words and "active (reserved" not in words and "= active" not in words:
        return Metric.RESERVED
    if "likely nvidia-smi" in words:
        assumed.append("the figure is nvidia-smi's")
        return Metric.DEVICE
    if "not stated" in words:
        assumed.append("the figure is torch's reserved memory")
        return Metric.RESERVED
    return Metric.ALLOCATED
