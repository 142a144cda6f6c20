"""From a row of published figures to a config of transformers and a description of the run.

A row holds what its source states, in the source's words. What it leaves out is assumed, and every
assumption is said. Nothing here looks at the published figure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from published_types import adapter, is_adapter, loss, metric, recompute, widths
from published_words import OutOfScope, Row, check_scope, family, text
from tightfit.bill.other_engines import DeepSpeedBuckets, OtherEngine, OtherRun
from tightfit.bill.other_megatron import MegatronModel
from tightfit.dry_run.config import load_config
from tightfit.units import GIB

__all__ = ["Description", "OutOfScope", "Row", "describe", "megatron_model", "text"]

# Megatron-LM's release runs do not state their size; the memory between steps that three of them
# publish agrees with this one.
RELEASE_RANKS = 128


@dataclass
class Description:
    """A row in tightfit's words.

    Attributes:
        assumed: what the row leaves unstated and what was taken in its place.
    """

    config: PretrainedConfig
    run: OtherRun
    assumed: list[str] = field(default_factory=list)


def describe(row: Row) -> Description:
    """The config and the run of a row.

    Raises:
        OutOfScope: no bill can be laid beside the row.
    """
    check_scope(row)
    assumed: list[str] = []
    engine = engine_of(row)
    if not row.get("world_size") and engine is not OtherEngine.SINGLE:
        assumed.append(f"{RELEASE_RANKS if engine is OtherEngine.MEGATRON else 1} ranks")
    run = OtherRun(
        engine=engine,
        micro_batch_size=micro_batch(row, assumed),
        sequence_length=sequence_length(row, assumed),
        widths=widths(row, engine, assumed),
        adapter=adapter(row, assumed),
        recompute=recompute(row, assumed),
        loss=loss(row, assumed),
        metric=metric(row, assumed),
        **parallel(row, engine),
        **habits(row, engine),
    )
    return Description(config_of(row, assumed), run, assumed)


# The model


def config_of(row: Row, assumed: list[str]) -> PretrainedConfig:
    """A config with the row's sizes."""
    kind = family(row)
    hidden, heads = row["arch_hidden"], row.get("arch_heads") or row["arch_hidden"] // 128
    vocabulary = row.get("arch_vocab_padded_this_tp") or row.get("arch_vocab")
    if not vocabulary:
        assumed.append("vocabulary of 32000")
        vocabulary = 32000
    if kind == "gpt_neox" and "litgpt" in text(row, "source_repo"):
        vocabulary = -(-vocabulary // 512) * 512  # litgpt's padding_multiple
    fields = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": row["arch_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": row.get("arch_kv_heads") or heads,
        "head_dim": row.get("arch_head_dim") or hidden // heads,
        "intermediate_size": row.get("arch_intermediate") or 4 * hidden,
        "vocab_size": vocabulary,
        "tie_word_embeddings": bool(row.get("arch_tied_embeddings")),
        "max_position_embeddings": max(8192, row.get("seq_len") or 0),
    }
    return load_config(_special(kind, fields, row))


def _special(kind: str, fields: dict[str, Any], row: Row) -> dict[str, Any]:
    """Fields as `kind` spells them."""
    if kind in ("qwen3_moe", "mixtral"):
        experts, each = row.get("arch_experts") or 8, row.get("arch_experts_per_token") or 2
        return fields | {
            "num_experts": experts,
            "num_local_experts": experts,
            "num_experts_per_tok": each,
            "moe_intermediate_size": fields["intermediate_size"],
        }
    if kind == "gpt2":
        names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers"}
        names |= {"n_head": "num_attention_heads", "n_inner": "intermediate_size"}
        renamed = {new: fields[old] for new, old in names.items()}
        kept = ("model_type", "vocab_size", "tie_word_embeddings")
        positions = {"n_positions": fields["max_position_embeddings"]}
        return {name: fields[name] for name in kept} | renamed | positions
    if kind == "opt":
        return fields | {
            "ffn_dim": fields["intermediate_size"],
            "word_embed_proj_dim": fields["hidden_size"],
        }
    if kind == "bloom":
        return fields | {
            "n_layer": fields["num_hidden_layers"],
            "n_head": fields["num_attention_heads"],
        }
    if kind == "falcon":
        del fields["head_dim"]
        return fields | {
            "multi_query": fields["num_key_value_heads"] == 1,
            "parallel_attn": True,
            "bias": False,
            "new_decoder_architecture": False,
            "ffn_hidden_size": fields["intermediate_size"],
        }
    if kind == "phi":
        return fields | {"partial_rotary_factor": 0.5, "hidden_act": "gelu_pytorch_tanh"}
    if kind == "gpt_neox":
        return fields | {"use_parallel_residual": True}
    return fields


# The engine


def engine_of(row: Row) -> OtherEngine:
    fsdp, stage = text(row, "fsdp", "parallelism"), row.get("zero_stage")
    source = text(row, "id", "source_repo", "source_path", "method", "framework")
    if "megatron" in source or "megatron-core" in text(row, "arch_desc"):
        return OtherEngine.MEGATRON
    if "no_shard" in fsdp or "ddp" in fsdp:
        return OtherEngine.DDP
    if "fsdp2" in fsdp:
        return OtherEngine.FSDP2
    if "fsdp" in fsdp:
        return OtherEngine.FSDP1
    if stage:
        return (OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3)[stage - 1]
    offload = text(row, "offload", "parallelism")
    if re.search(r"zero-?3|infinity", offload):
        return OtherEngine.ZERO3
    if re.search(r"zero-?2", offload):
        return OtherEngine.ZERO2
    ranks = row.get("world_size") or 1
    return OtherEngine.DDP if ranks > 1 else OtherEngine.SINGLE


def parallel(row: Row, engine: OtherEngine) -> dict[str, Any]:
    """Numbers of ranks."""
    ranks = row.get("world_size") or (RELEASE_RANKS if engine is OtherEngine.MEGATRON else 1)
    tensor, pipeline, context = (row.get(name) or 1 for name in ("tp", "pp", "cp"))
    shards = max(1, ranks // (tensor * pipeline))
    if engine is OtherEngine.MEGATRON:
        shards = (row.get("dp") or shards) * context if row.get("distributed_optimizer") else 1
    return {
        "shards": shards,
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "context_parallel": context,
        # torchtitan's tensor parallelism shares sequences, its pipeline does not reshard
        "sequence_parallel": bool(
            row.get("sequence_parallel", engine is OtherEngine.FSDP2 and tensor > 1)
        ),
        "in_flight": pipeline if engine is OtherEngine.FSDP2 else 1,
        "keep_layers": engine is OtherEngine.FSDP2 and pipeline > 1,
        "accumulates": (row.get("grad_accum") or 1) > 1
        or (row.get("global_batch") or 0)
        > (row.get("micro_batch") or 1) * (ranks // (tensor * pipeline)),
    }


def habits(row: Row, engine: OtherEngine) -> dict[str, Any]:
    """What a program does beside its engine's options."""
    source, offload = text(row, "source_repo", "source_issue"), text(row, "offload")
    quantised_by_bnb = "bnb" in text(row, "weights_dtype", "quantization", "optimizer")
    qwen1 = bool(re.search(r"qwen/qwen-\d", text(row, "model_hf_id")))
    everything = "infinity" in offload
    parameters = "param" in offload or everything
    return {
        "autocast": "amp" in text(row, "weights_dtype"),
        "compiled": bool(row.get("compile")),
        "flash_attention": not re.search(
            r"eager|unfused|math|softmax", text(row, "attention_kernel")
        ),
        "fused_qkv": "litgpt" in source or qwen1,
        "keeps_inputs": (4 if "litgpt" in source else 2) if quantised_by_bnb else 0,
        "keeps_mlp_product": "litgpt" in source,
        "keeps_outputs": "adapter v2" in text(row, "method"),
        "train_embeddings": bool(row.get("lora_extra_trainable")),
        "optimizer_in_backward": bool(row.get("optimizer_in_bwd")),
        "offload_activations": "activation" in offload or "inputs" in offload,
        "offload_parameters": parameters,
        "offload_optimizer": bool(re.search("optimizer|adam|infinity", offload)),
        # torchao sends each gradient away as it comes; prime-rl after backward.
        "offload_gradients": ("grad" in offload or everything) and "prime-rl" not in source,
        "capability": capability(row),
        "expandable_segments": "titan" in text(row, "source_repo", "peak_metric")
        or "torchtitan" in text(row, "unsure"),
        "keep_root": not (
            "titan" in text(row, "source_repo", "peak_metric") and text(row, "date") >= "2025-06"
        ),
        "deepspeed": _buckets(row, engine),
        "lengths": lengths(row),
        "card_bytes": card_bytes(row),
        "no_sync": ("litgpt" in source and engine is OtherEngine.FSDP1) or (row.get("pp") or 1) > 1,
        "frozen_gradients": "litgpt" in source and engine is OtherEngine.FSDP1 and is_adapter(row),
    }


def _buckets(row: Row, engine: OtherEngine) -> DeepSpeedBuckets:
    """As the row's config says, else as the Hugging Face integration and its examples set them:
    stage 2 with 2e8, stage 3 "auto", which is the hidden size squared and 0.9 of it."""
    stated = row.get("ds_config") or {}
    automatic = (row.get("arch_hidden") or 4096) ** 2
    stage3 = engine is OtherEngine.ZERO3
    return DeepSpeedBuckets(
        reduce=stated.get("reduce_bucket_size") or (automatic if stage3 else 2e8),
        prefetch=stated.get("stage3_prefetch_bucket_size") or 0.9 * automatic,
        overlap=stated.get("overlap_comm", True),
    )


_CAPABILITIES = (
    (r"v100", (7, 0)),
    (r"titan rtx|t4|2080", (7, 5)),
    (r"a10g|a6000|3090|3080|a40|a10\b", (8, 6)),
    (r"4090|4070|l40|ada|l4\b", (8, 9)),
    (r"h100|h200|h800|gh200", (9, 0)),
    (r"b200|b300", (10, 0)),
    (r"pro 6000|5090", (12, 0)),
)


def capability(row: Row) -> tuple[int, int]:
    """Of the card; an A100's where it is not named."""
    card = text(row, "gpu")
    return next((found for pattern, found in _CAPABILITIES if re.search(pattern, card)), (8, 0))


# Sizes of the work


def micro_batch(row: Row, assumed: list[str]) -> int:
    if row.get("micro_batch") and (row.get("pp") or 1) > 1 and "titan" in text(row, "source_repo"):
        assumed.append("one sample per pipeline micro-batch")
        return 1
    if row.get("micro_batch"):
        return int(row["micro_batch"])
    if row.get("batch_per_dp"):
        return int(row["batch_per_dp"])
    assumed.append("micro-batch 1" if not row.get("batch_per_dp") else "the batch is not split")
    return 1


def sequence_length(row: Row, assumed: list[str]) -> int:
    kind, length = text(row, "seq_len_kind", "note"), row.get("seq_len")
    if "400-600" in kind:
        assumed.append("longest batch of 600 tokens, the end of the range the row gives")
        return 600
    if "<200 tokens" in kind:
        assumed.append("samples of 200 tokens")
        return 200
    if "alpaca" in kind and ("unpacked" in kind or not length):
        assumed.append("longest Alpaca sample of the run: 512 tokens")
        return 512
    if not length:
        assumed.append("2048 tokens per sample")
        return 2048
    if kind.startswith("cap"):
        assumed.append("the longest sample reaches the cap")
    return int(length)


def card_bytes(row: Row) -> int | None:
    """The card's memory where its name says it."""
    stated = re.search(r"(\d+) ?gi?b", text(row, "gpu"))
    return int(stated[1]) * GIB if stated else None


_STEPS = 24


def lengths(row: Row) -> tuple[float, ...]:
    """Of the samples of some steps, as shares of the longest, where the row gives a mean.

    Quantiles of an exponential distribution with that mean, cut at the cap, far ones in turn.
    """
    mean = re.search(r"mean (\d+) tokens", text(row, "seq_len_kind"))
    if mean is None or not row.get("seq_len"):
        return (1.0, 1.0)
    shares = [(step * 7 % _STEPS + 0.5) / _STEPS for step in range(_STEPS)]
    drawn = [-math.log(1 - share) * int(mean[1]) / row["seq_len"] for share in shares]
    return (*(min(1.0, length) for length in drawn), 1.0)


def megatron_model(row: Row) -> MegatronModel:
    """A row of Megatron-LM in the words of its closed forms."""
    stage = row["arch_layers"] // (row.get("pp") or 1)
    per_chunk = row.get("virtual_pp_layers_per_stage")
    return MegatronModel(
        layers=row["arch_layers"],
        hidden=row["arch_hidden"],
        heads=row["arch_heads"],
        kv_heads=row.get("arch_kv_heads") or row["arch_heads"],
        head_dim=row.get("arch_head_dim") or row["arch_hidden"] // row["arch_heads"],
        intermediate=row["arch_intermediate"],
        vocabulary=row.get("arch_vocab_padded_this_tp") or row["arch_vocab"],
        tied=bool(row.get("arch_tied_embeddings")),
        gated=bool(row.get("arch_swiglu", "megatron-core" not in text(row, "arch_desc"))),
        learned_positions=(row.get("seq_len") or 0)
        * (row.get("arch_position") == "learned_absolute"),
        experts=row.get("arch_experts") or 1,
        experts_per_token=row.get("arch_experts_per_token") or 1,
        expert_parallel=row.get("ep") or 1,
        virtual_stages=max(1, stage // per_chunk) if per_chunk else 1,
    )
