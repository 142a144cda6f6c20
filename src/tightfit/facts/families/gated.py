"""Decoders with a gated MLP in every layer: Llama and its relatives."""

from __future__ import annotations

from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.families.parts import (
    attention,
    attention_with_flag,
    decoder,
    fused_attention,
    fused_gated_mlp,
    gated_mlp,
    norm,
    qk_norms,
)
from tightfit.facts.parameter_count import LayerParameters, ParameterCounts


def llama(fields: ConfigFields) -> ParameterCounts:
    """Llama, and those that only differ in what their layers do with the same parameters."""
    hidden = fields.hidden_size
    mlp = gated_mlp(hidden, fields.intermediate_size, bias=fields.flag("mlp_bias"))
    layer = attention_with_flag(fields) + mlp + norm(hidden, count=2)
    return decoder(fields, layer, norm(hidden))


def mistral(fields: ConfigFields) -> ParameterCounts:
    """Mistral: no biases."""
    return _with_mlp(fields, attention(fields), norms=2)


def qwen2(fields: ConfigFields) -> ParameterCounts:
    """Qwen 2 and 2.5: biases of queries, keys and values."""
    return _with_mlp(fields, attention(fields, bias=True), norms=2)


def qwen3(fields: ConfigFields) -> ParameterCounts:
    """Qwen 3: norms of queries and keys, one for all heads."""
    return _with_mlp(fields, attention_with_flag(fields) + qk_norms(fields, per_head=True), norms=2)


def gemma(fields: ConfigFields) -> ParameterCounts:
    """Gemma."""
    return _with_mlp(fields, attention_with_flag(fields), norms=2)


def gemma2(fields: ConfigFields) -> ParameterCounts:
    """Gemma 2: norms behind attention and MLP too."""
    return _with_mlp(fields, attention_with_flag(fields), norms=4)


def gemma3(fields: ConfigFields) -> ParameterCounts:
    """Gemma 3's text model: norms of queries and keys as well."""
    return _with_mlp(fields, attention_with_flag(fields) + qk_norms(fields, per_head=True), norms=4)


def olmo(fields: ConfigFields) -> ParameterCounts:
    """OLMo: norms without parameters."""
    layer = attention_with_flag(fields) + gated_mlp(fields.hidden_size, fields.intermediate_size)
    return decoder(fields, layer, LayerParameters())


def olmo2(fields: ConfigFields) -> ParameterCounts:
    """OLMo 2 and 3: norms of queries and keys over all heads together."""
    attending = attention_with_flag(fields) + qk_norms(fields, per_head=False)
    return _with_mlp(fields, attending, norms=2)


def cohere(fields: ConfigFields) -> ParameterCounts:
    """Command R: attention and MLP side by side behind one norm."""
    attending = attention_with_flag(fields)
    if fields.flag("use_qk_norm"):
        attending += qk_norms(fields, per_head=False)
    return _with_mlp(fields, attending, norms=1)


def stablelm(fields: ConfigFields) -> ParameterCounts:
    """StableLM: norms with a shift; where queries and keys have norms, one for each head."""
    hidden = fields.hidden_size
    layer = attention(fields, bias=fields.flag("use_qkv_bias"))
    if fields.flag("qk_layernorm"):
        layer += qk_norms(fields, per_head=False)
    norms = 1 if fields.flag("use_parallel_residual") else 2
    layer += gated_mlp(hidden, fields.intermediate_size) + norm(hidden, bias=True, count=norms)
    return decoder(fields, layer, norm(hidden, bias=True))


def phi3(fields: ConfigFields) -> ParameterCounts:
    """Phi 3 and 4: one map to queries, keys and values, one to gate and up."""
    return _with_fused_mlp(fields, fused_attention(fields, ("qkv_proj", "o_proj")), norms=2)


def glm(fields: ConfigFields) -> ParameterCounts:
    """GLM-4 of 2024: gate and up in one map."""
    bias = fields.flag("attention_bias")
    return _with_fused_mlp(fields, attention(fields, bias=bias), norms=2)


def glm4(fields: ConfigFields) -> ParameterCounts:
    """GLM-4 of 2025: norms behind attention and MLP too."""
    bias = fields.flag("attention_bias")
    return _with_fused_mlp(fields, attention(fields, bias=bias), norms=4)


def _with_mlp(fields: ConfigFields, attending: LayerParameters, norms: int) -> ParameterCounts:
    hidden = fields.hidden_size
    layer = attending + gated_mlp(hidden, fields.intermediate_size) + norm(hidden, count=norms)
    return decoder(fields, layer, norm(hidden))


def _with_fused_mlp(
    fields: ConfigFields, attending: LayerParameters, norms: int
) -> ParameterCounts:
    hidden = fields.hidden_size
    layer = attending + fused_gated_mlp(hidden, fields.intermediate_size)
    return decoder(fields, layer + norm(hidden, count=norms), norm(hidden))
