"""Decoders with experts, of which every token uses a few.

transformers 5 stacks the experts of a layer in two tensors that are no linear layers, and keeps
most routers as plain parameters. peft reaches them in the families whose checkpoints it knows how
to convert (peft/utils/transformers_weight_conversion.py), under the names the maps had before.
"""

from __future__ import annotations

from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.families.parts import (
    attention,
    attention_with_flag,
    decoder,
    gated_mlp,
    linear,
    norm,
    qk_norms,
)
from tightfit.facts.parameter_count import LayerParameters, ParameterCounts, StackedWeights

# Router, gate, up, down: the names by which peft finds them.
Targets = tuple[str, str, str, str]
_QWEN: Targets = ("gate", "gate_proj", "up_proj", "down_proj")
_MIXTRAL: Targets = ("gate", "w1", "w3", "w2")


def mixtral(fields: ConfigFields) -> ParameterCounts:
    """Mixtral."""
    return _all_sparse(fields, attention(fields), _MIXTRAL)


def olmoe(fields: ConfigFields) -> ParameterCounts:
    """OLMoE: norms of queries and keys over all heads together."""
    attending = attention_with_flag(fields) + qk_norms(fields, per_head=False)
    return _all_sparse(fields, attending, _QWEN)


def granitemoe(fields: ConfigFields) -> ParameterCounts:
    """Granite with experts."""
    return _all_sparse(fields, attention_with_flag(fields), None)


def phimoe(fields: ConfigFields) -> ParameterCounts:
    """Phi 3.5 MoE: a linear layer as router, norms with a shift."""
    hidden = fields.hidden_size
    layer = (
        attention_with_flag(fields)
        + linear("router", hidden, fields.number("num_local_experts"))
        + _experts(fields, fields.intermediate_size, None)
        + norm(hidden, bias=True, count=2)
    )
    last = norm(hidden, bias=True)
    return decoder(fields, layer, last, head_bias=fields.flag("lm_head_bias"))


def gpt_oss(fields: ConfigFields) -> ParameterCounts:
    """gpt-oss: experts and router with biases, and a sink for every head."""
    hidden, width = fields.hidden_size, fields.intermediate_size
    count, used = fields.number("num_local_experts"), fields.number("num_experts_per_tok")
    biases = 2 * width + hidden
    sinks_and_biases = LayerParameters(
        other=fields.num_heads + count + count * biases, idle=(count - used) * biases
    )
    layer = (
        attention_with_flag(fields)
        + _router(fields, None)
        + _experts(fields, width, None)
        + sinks_and_biases
        + norm(hidden, count=2)
    )
    return decoder(fields, layer, norm(hidden))


def qwen2_moe(fields: ConfigFields) -> ParameterCounts:
    """Qwen 1.5 and 2 with experts: another expert that every token uses, behind a gate."""
    hidden = fields.hidden_size
    attending = attention(fields, bias=fields.flag("qkv_bias")) + norm(hidden, count=2)
    sparse = (
        _router(fields, None)
        + _experts(fields, fields.number("moe_intermediate_size"), None)
        + gated_mlp(hidden, fields.number("shared_expert_intermediate_size"))
        + linear("shared_expert_gate", hidden, 1)
    )
    return _partly_sparse(fields, attending, sparse)


def qwen3_moe(fields: ConfigFields) -> ParameterCounts:
    """Qwen 3 with experts."""
    attending = attention_with_flag(fields) + qk_norms(fields, per_head=True)
    width = fields.number("moe_intermediate_size")
    sparse = _router(fields, _QWEN) + _experts(fields, width, _QWEN)
    return _partly_sparse(fields, attending + norm(fields.hidden_size, count=2), sparse)


def deepseek_v2(fields: ConfigFields) -> ParameterCounts:
    """DeepSeek V2."""
    return _deepseek(fields, mlp_bias=fields.flag("mlp_bias"))


def deepseek_v3(fields: ConfigFields) -> ParameterCounts:
    """DeepSeek V3 and R1. Their checkpoints hold a correction for every expert that is no parameter
    here, and a layer for predicting a second token that transformers leaves out."""
    return _deepseek(fields, mlp_bias=False)


def _deepseek(fields: ConfigFields, *, mlp_bias: bool) -> ParameterCounts:
    """Latent attention; the first layers are dense, the others have shared experts too."""
    hidden, width = fields.hidden_size, fields.number("moe_intermediate_size")
    attending = _latent_attention(fields) + norm(hidden, count=2)
    dense = attending + gated_mlp(hidden, fields.intermediate_size, bias=mlp_bias)
    sparse = attending + _router(fields, _QWEN) + _experts(fields, width, _QWEN)
    shared = fields.optional_number("n_shared_experts", minimum=0)
    if shared:
        sparse += gated_mlp(hidden, shared * width, bias=mlp_bias)
    dense_layers = min(fields.number("first_k_dense_replace", minimum=0), fields.num_layers)
    return decoder(fields, sparse, norm(hidden), first=(dense,) * dense_layers)


def _latent_attention(fields: ConfigFields) -> LayerParameters:
    """Queries through a narrow layer (or not), keys and values through another."""
    hidden, heads, bias = fields.hidden_size, fields.num_heads, fields.flag("attention_bias")
    plain, rotary = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    value, narrow = fields.number("v_head_dim"), fields.number("kv_lora_rank")
    return (
        _latent_queries(fields, heads * (plain + rotary), bias=bias)
        + linear("kv_a_proj_with_mqa", hidden, narrow + rotary, bias=bias)
        + norm(narrow)
        + linear("kv_b_proj", narrow, heads * (plain + value))
        + linear("o_proj", heads * value, hidden, bias=bias)
    )


def _latent_queries(fields: ConfigFields, width: int, *, bias: bool) -> LayerParameters:
    narrow = fields.optional_number("q_lora_rank")
    if narrow is None:
        return linear("q_proj", fields.hidden_size, width)
    first = linear("q_a_proj", fields.hidden_size, narrow, bias=bias)
    return first + norm(narrow) + linear("q_b_proj", narrow, width)


def _all_sparse(
    fields: ConfigFields, attending: LayerParameters, targets: Targets | None
) -> ParameterCounts:
    """Experts in every layer, each as wide as `intermediate_size` says."""
    hidden = fields.hidden_size
    sparse = _router(fields, targets) + _experts(fields, fields.intermediate_size, targets)
    return decoder(fields, attending + sparse + norm(hidden, count=2), norm(hidden))


def _partly_sparse(
    fields: ConfigFields, attending: LayerParameters, sparse: LayerParameters
) -> ParameterCounts:
    """Dense where `mlp_only_layers` says so and between every `decoder_sparse_step`-th layer."""
    step, depth = fields.number("decoder_sparse_step"), fields.num_layers
    only = fields.value("mlp_only_layers") or []
    if not isinstance(only, list):
        raise fields.refusal("'mlp_only_layers' must be a list of layer numbers")
    kinds = [index not in only and (index + 1) % step == 0 for index in range(depth)]
    layer = attending + sparse
    dense = layer
    if not all(kinds):
        dense = attending + gated_mlp(fields.hidden_size, fields.intermediate_size)
    layers = tuple(layer if has_experts else dense for has_experts in kinds)
    return decoder(fields, layer, norm(fields.hidden_size), first=layers)


def _router(fields: ConfigFields, targets: Targets | None) -> LayerParameters:
    count = fields.number("num_local_experts")
    names = targets[:1] if targets else ()
    return LayerParameters(stacked=(StackedWeights(1, fields.hidden_size, count, names),))


def _experts(fields: ConfigFields, width: int, targets: Targets | None) -> LayerParameters:
    """Gated MLPs of that width, gate and up in one tensor, down in another."""
    hidden, count = fields.hidden_size, fields.number("num_local_experts")
    idle = count - fields.number("num_experts_per_tok")
    both, down = (targets[1:3], targets[3:]) if targets else ((), ())
    stacked = (
        StackedWeights(count, hidden, 2 * width, both),
        StackedWeights(count, width, hidden, down),
    )
    return LayerParameters(stacked=stacked, idle=idle * 3 * hidden * width)
