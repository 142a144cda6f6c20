"""Decoders with a plain MLP of two maps: GPT-2 and its relatives."""

from __future__ import annotations

from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.families.parts import (
    attention,
    decoder,
    fused_attention,
    linear,
    mlp,
    norm,
)
from tightfit.facts.parameter_count import LayerParameters, ParameterCounts

_FUSED = ("query_key_value", "dense")
_TO_4H = ("dense_h_to_4h", "dense_4h_to_h")


def gpt2(fields: ConfigFields) -> ParameterCounts:
    """GPT-2: its linear layers are `Conv1D`."""
    return _with_table(fields, fused_attention(fields, ("c_attn", "c_proj"), bias=True))


def gpt_bigcode(fields: ConfigFields) -> ParameterCounts:
    """StarCoder 1: one head of keys and values."""
    kv_heads = 1 if fields.flag("multi_query") else fields.num_heads
    names = ("c_attn", "c_proj")
    return _with_table(fields, fused_attention(fields, names, kv_heads=kv_heads, bias=True))


def gpt_neo(fields: ConfigFields) -> ParameterCounts:
    """GPT-Neo."""
    return _with_table(fields, attention(fields, out="out_proj", out_bias=True))


def _with_table(fields: ConfigFields, attending: LayerParameters) -> ParameterCounts:
    """GPT-2's block, and a table of positions beside the embedding."""
    hidden = fields.hidden_size
    one = norm(hidden, bias=True)
    layer = attending + mlp(hidden, _width(fields), ("c_fc", "c_proj")) + one + one
    table = LayerParameters(other=fields.number("max_position_embeddings") * hidden)
    return decoder(fields, layer, table + one)


def gptj(fields: ConfigFields) -> ParameterCounts:
    """GPT-J: one norm before attention and MLP, a bias of the output layer."""
    hidden = fields.hidden_size
    layer = attention(fields, out="out_proj") + mlp(hidden, _width(fields), ("fc_in", "fc_out"))
    one = norm(hidden, bias=True)
    return decoder(fields, layer + one, one, head_bias=True)


def gpt_neox(fields: ConfigFields) -> ParameterCounts:
    """GPT-NeoX and Pythia."""
    hidden, bias = fields.hidden_size, fields.flag("attention_bias")
    layer = fused_attention(fields, _FUSED, bias=bias)
    layer += mlp(hidden, fields.intermediate_size, _TO_4H) + norm(hidden, bias=True, count=2)
    return decoder(fields, layer, norm(hidden, bias=True))


def bloom(fields: ConfigFields) -> ParameterCounts:
    """BLOOM: a norm behind the embedding too."""
    hidden = fields.hidden_size
    two = norm(hidden, bias=True, count=2)
    layer = fused_attention(fields, _FUSED, bias=True)
    return decoder(fields, layer + mlp(hidden, 4 * hidden, _TO_4H) + two, two)


def mpt(fields: ConfigFields) -> ParameterCounts:
    """MPT: no biases, not even in its norms."""
    hidden = fields.hidden_size
    layer = fused_attention(fields, ("Wqkv", "out_proj"))
    layer += mlp(hidden, 4 * hidden, ("up_proj", "down_proj"), bias=False)
    return decoder(fields, layer + norm(hidden, count=2), norm(hidden))


def falcon(fields: ConfigFields) -> ParameterCounts:
    """Falcon 1: one head of keys and values, or some, or all, by architecture."""
    hidden, bias = fields.hidden_size, fields.flag("bias")
    is_new = fields.flag("new_decoder_architecture")
    kv_heads = fields.num_kv_heads if is_new else fields.num_heads
    if fields.flag("multi_query") and not is_new:
        kv_heads = 1
    layer = fused_attention(fields, _FUSED, kv_heads=kv_heads, bias=bias)
    layer += mlp(hidden, _width(fields), _TO_4H, bias=bias)
    norms = fields.optional_number("num_ln_in_parallel_attn") or (2 if is_new else 1)
    two_norms = norms == 2 or not fields.flag("parallel_attn")
    layer += norm(hidden, bias=True, count=2 if two_norms else 1)
    return decoder(fields, layer, norm(hidden, bias=True))


def opt(fields: ConfigFields) -> ParameterCounts:
    """OPT: two rows more in its table than positions; the 350m has a narrow embedding."""
    hidden, bias = fields.hidden_size, fields.flag("enable_bias")
    affine = fields.flag("layer_norm_elementwise_affine")
    one_norm = norm(hidden, bias=True) if affine else LayerParameters()
    layer = attention(fields, bias=bias, out="out_proj", out_bias=bias)
    layer += mlp(hidden, fields.intermediate_size, ("fc1", "fc2"), bias=bias)
    layer += one_norm + one_norm
    outside = LayerParameters(other=(fields.number("max_position_embeddings") + 2) * hidden)
    if fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm"):
        outside += one_norm
    width = fields.optional_number("word_embed_proj_dim") or hidden
    if width != hidden:
        outside += linear("project_in", width, hidden) + linear("project_out", hidden, width)
    embedding = fields.vocab_size * width
    head = 0 if fields.tied else embedding
    return ParameterCounts(embedding, head, outside, (layer,) * fields.num_layers)


def phi(fields: ConfigFields) -> ParameterCounts:
    """Phi 1 and 2: one norm before attention and MLP, a bias of the output layer."""
    hidden = fields.hidden_size
    layer = attention(fields, bias=True, out="dense", out_bias=True)
    if fields.flag("qk_layernorm"):
        layer += norm(fields.head_dim, bias=True, count=2)
    layer += mlp(hidden, fields.intermediate_size, ("fc1", "fc2")) + norm(hidden, bias=True)
    return decoder(fields, layer, norm(hidden, bias=True), head_bias=True)


def starcoder2(fields: ConfigFields) -> ParameterCounts:
    """StarCoder 2."""
    hidden, bias = fields.hidden_size, fields.flag("use_bias")
    layer = attention(fields, bias=bias, out_bias=bias)
    layer += mlp(hidden, fields.intermediate_size, ("c_fc", "c_proj"), bias=bias)
    return decoder(fields, layer + norm(hidden, bias=True, count=2), norm(hidden, bias=True))


def _width(fields: ConfigFields) -> int:
    """Inside the MLP; four times the model's width unless said."""
    return fields.optional_number("intermediate_size") or 4 * fields.hidden_size
