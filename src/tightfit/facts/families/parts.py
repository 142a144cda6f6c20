"""The parts that decoders are built from, as counts: attention, MLP, norms, the model around them.

Modules have the names they have in transformers 5. Does not know which family uses which part.
"""

from __future__ import annotations

from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.parameter_count import LayerParameters, Linear, ParameterCounts

QKV = ("q_proj", "k_proj", "v_proj")


def norm(width: int, *, bias: bool = False, count: int = 1) -> LayerParameters:
    """`count` norms: a factor for every channel, and a shift with `bias`."""
    return LayerParameters(other=count * width * (2 if bias else 1))


def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> LayerParameters:
    """One linear map."""
    return LayerParameters(linears=(Linear(name, inputs, outputs, bias),))


def attention(
    fields: ConfigFields, *, bias: bool = False, out: str = "o_proj", out_bias: bool = False
) -> LayerParameters:
    """Projections to queries, keys and values, and back."""
    query, key_value = _widths(fields)
    sizes = zip(QKV, (query, key_value, key_value), strict=True)
    maps = [linear(name, fields.hidden_size, size, bias=bias) for name, size in sizes]
    back = linear(out, query, fields.hidden_size, bias=out_bias)
    return sum(maps, LayerParameters()) + back


def attention_with_flag(fields: ConfigFields) -> LayerParameters:
    """`attention` where `attention_bias` gives all four maps a bias, or none."""
    bias = fields.flag("attention_bias")
    return attention(fields, bias=bias, out_bias=bias)


def fused_attention(
    fields: ConfigFields,
    names: tuple[str, str],
    *,
    kv_heads: int | None = None,
    bias: bool = False,
) -> LayerParameters:
    """One projection to queries, keys and values together, and one back.

    Args:
        names: of the two modules.
        kv_heads: where it is not the config's number.
    """
    query, key_value = _widths(fields, kv_heads)
    return linear(names[0], fields.hidden_size, query + 2 * key_value, bias=bias) + linear(
        names[1], query, fields.hidden_size, bias=bias
    )


def qk_norms(fields: ConfigFields, *, per_head: bool) -> LayerParameters:
    """Norms of queries and keys: over one head's width, or over all heads together."""
    if per_head:
        return norm(fields.head_dim, count=2)
    return norm(sum(_widths(fields)))


def _widths(fields: ConfigFields, kv_heads: int | None = None) -> tuple[int, int]:
    kv_heads = fields.num_kv_heads if kv_heads is None else kv_heads
    return fields.num_heads * fields.head_dim, kv_heads * fields.head_dim


def gated_mlp(hidden: int, width: int, *, bias: bool = False) -> LayerParameters:
    """Gate and up side by side, and down."""
    return (
        linear("gate_proj", hidden, width, bias=bias)
        + linear("up_proj", hidden, width, bias=bias)
        + linear("down_proj", width, hidden, bias=bias)
    )


def fused_gated_mlp(hidden: int, width: int) -> LayerParameters:
    """Gate and up in one linear map, and down."""
    return linear("gate_up_proj", hidden, 2 * width) + linear("down_proj", width, hidden)


def mlp(hidden: int, width: int, names: tuple[str, str], *, bias: bool = True) -> LayerParameters:
    """Up and down.

    Args:
        names: of the two modules.
    """
    return linear(names[0], hidden, width, bias=bias) + linear(names[1], width, hidden, bias=bias)


def decoder(
    fields: ConfigFields,
    layer: LayerParameters,
    outside: LayerParameters,
    *,
    first: tuple[LayerParameters, ...] = (),
    head_bias: bool = False,
) -> ParameterCounts:
    """A model whose layers are all alike, but for the `first` ones.

    Args:
        outside: what belongs to no layer, but embedding and output layer.
    """
    embedding = fields.vocab_size * fields.hidden_size
    head = (0 if fields.tied else embedding) + (fields.vocab_size if head_bias else 0)
    layers = (first + (layer,) * fields.num_layers)[: fields.num_layers]
    return ParameterCounts(embedding, head, outside, layers)
