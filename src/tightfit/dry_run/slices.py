"""The part of a model that one tensor- or pipeline-parallel rank computes, as a config of its own.

A tensor-parallel rank has its share of the heads, of each MLP and of the vocabulary at the full
width of the hidden state (https://arxiv.org/abs/1909.08053), which is what a model with fewer heads
and narrower MLPs allocates. A pipeline stage has its share of the layers.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from tightfit.bill.shards import ceil_divide
from tightfit.dry_run.config import load_config
from tightfit.dry_run.depth import with_depth
from tightfit.errors import UnsupportedError

_DIVIDED = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def tensor_slice(config: PretrainedConfig, ranks: int) -> PretrainedConfig:
    """What one of `ranks` tensor-parallel ranks holds.

    Raises:
        UnsupportedError: the heads cannot be shared out, or the model has no plan for it.
    """
    if ranks == 1:
        return config
    _check_plan(config)
    fields = config.to_dict()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = fields.get("head_dim") or config.hidden_size // heads
    _check_heads(heads, kv_heads, ranks)
    narrower = {
        key: ceil_divide(fields[key], ranks)
        for key in (*_DIVIDED, "vocab_size")
        if isinstance(fields.get(key), int)
    }
    return load_config(
        {
            **fields,
            **narrower,
            "head_dim": head_dim,
            "num_attention_heads": heads // ranks,
            "num_key_value_heads": max(1, kv_heads // ranks),
            "pad_token_id": None,  # may be a token of another rank's share
        }
    )


def pipeline_slice(config: PretrainedConfig, stages: int) -> PretrainedConfig:
    """A stage with the most layers, and both ends.

    Raises:
        UnsupportedError: there are fewer layers than stages.
    """
    depth = config.num_hidden_layers
    if stages > depth:
        raise UnsupportedError(
            f"pipeline_parallel_size {stages} is more than the model's {depth} layers"
        )
    return config if stages == 1 else with_depth(config, ceil_divide(depth, stages))


def _check_plan(config: PretrainedConfig) -> None:
    if not config.base_model_tp_plan:
        raise UnsupportedError(
            f"a {config.model_type} model has no tensor-parallel plan in transformers; "
            "llama, qwen2, qwen3, mistral, gemma, phi3 and their like have one"
        )


def _check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    if heads % ranks:
        raise UnsupportedError(
            f"tensor_parallel_size {ranks} does not divide the model's {heads} heads"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise UnsupportedError(
            f"tensor_parallel_size {ranks} and the model's {kv_heads} key and value heads: "
            "neither is a multiple of the other"
        )
