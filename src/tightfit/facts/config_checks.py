"""What a config.json may not say: missing, impossible or contradicting fields.

Looks at what every family has in common, then lets the family's closed form ask for the rest.
Does not know files, and not what a value that is right is used for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from tightfit.errors import InputError
from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.families import closed_form_families, count_parameters

# Sizes that, where they are, are whole numbers of at least this.
_SIZES = {
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "intermediate_size": 1,
    "moe_intermediate_size": 1,
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "sliding_window": 0,
}
_POSITIVE = ("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_PACKINGS = ("quantization_config", "compression_config")
_OBJECTS = ("rope_scaling", "rope_parameters", "text_config", *_PACKINGS)
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
_MOST_LAYERS = 10_000
_ENDLESS = 1e15

# Families that rotate only a part of each head, or none of it.
_ROTATE_NO_WHOLE_HEAD = (
    "bloom",
    "deepseek_v2",
    "deepseek_v3",
    "falcon",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "mpt",
    "opt",
    "phi",
    "phi3",
    "stablelm",
)


def check_config(fields: ConfigFields) -> None:
    """See that a config.json describes a model.

    Raises:
        InputError: it does not; says which field is wrong and why.
    """
    model_type = fields.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise fields.refusal(
            "there is no 'model_type'; transformers cannot tell what model this is"
        )
    _check_single_fields(fields)
    _check_unpacked(fields)
    for check in (_check_parts, _check_padding, _check_depth):
        check(fields)
    for check in (_check_heads, _check_experts, _check_rotation):
        check(fields)
    count_parameters(fields)


def _check_unpacked(fields: ConfigFields) -> None:
    for key in _PACKINGS:
        method = fields.value(key)
        if method is not None:
            name = method.get("quant_method", "unknown")
            raise fields.refusal(
                f"the weights are already quantised ({name}); name the model they were made from"
            )


def _check_single_fields(fields: ConfigFields) -> None:
    has_closed_form = fields.model_type in closed_form_families()
    for key, minimum in _SIZES.items():
        # some families write a list, one entry per layer; those have no closed form
        if has_closed_form or not isinstance(fields.value(key), list):
            fields.optional_number(key, minimum)
    fields.flag("tie_word_embeddings")
    _check_kind(fields, _POSITIVE, _is_positive, "a number above 0")
    _check_kind(fields, _OBJECTS, lambda value: isinstance(value, dict), "an object")
    _check_kind(fields, _BY_LAYER, _is_plain_list, "a list of words or numbers")


def _check_kind(
    fields: ConfigFields, keys: tuple[str, ...], is_right: Callable[[Any], bool], kind: str
) -> None:
    for key in keys:
        value = fields.value(key)
        if value is not None and not is_right(value):
            raise fields.refusal(f"{key!r} must be {kind}, not {str(value)[:60]!r}")


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _ENDLESS


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str | int) for entry in value)


def _check_parts(fields: ConfigFields) -> None:
    if fields.model_type in closed_form_families() and fields.value("text_config") is not None:
        raise fields.refusal(
            f"a {fields.model_type} model has no parts, but there is 'text_config'"
        )


def _check_padding(fields: ConfigFields) -> None:
    padding, rows = fields.value("pad_token_id"), _single(fields, "vocab_size")
    if isinstance(padding, int) and rows is not None and padding >= rows:
        raise fields.refusal(f"'pad_token_id' is {padding}, but 'vocab_size' is {rows}")


def _check_depth(fields: ConfigFields) -> None:
    depth = _single(fields, "num_hidden_layers")
    if depth is None:
        return
    if depth > _MOST_LAYERS:
        raise fields.refusal(f"'num_hidden_layers' is {depth}; no model has so many layers")
    for key in _BY_LAYER:
        value = fields.value(key)
        if value is not None and len(value) != depth:
            raise fields.refusal(
                f"{key!r} describes {len(value)} layers, but 'num_hidden_layers' is {depth}"
            )


def _check_heads(fields: ConfigFields) -> None:
    hidden, heads = _single(fields, "hidden_size"), _single(fields, "num_attention_heads")
    kv_heads = _single(fields, "num_key_value_heads")
    if heads is None:
        return
    own_width = fields.value("head_dim") or fields.value("qk_rope_head_dim")
    if hidden is not None and own_width is None and hidden % heads:
        raise fields.refusal(
            f"'hidden_size' {hidden} is not a multiple of 'num_attention_heads' {heads}, "
            "and there is no 'head_dim'"
        )
    if kv_heads is not None and heads % kv_heads:
        raise fields.refusal(
            f"'num_attention_heads' {heads} is not a multiple of 'num_key_value_heads' {kv_heads}"
        )


def _check_experts(fields: ConfigFields) -> None:
    count, used = _single(fields, "num_local_experts"), _single(fields, "num_experts_per_tok")
    if count and used is not None and used > count:
        raise fields.refusal(f"'num_experts_per_tok' is {used}, but there are {count} experts")


def _check_rotation(fields: ConfigFields) -> None:
    """Rotary positions turn pairs of channels."""
    if fields.model_type not in closed_form_families():
        return
    rotated = _single(fields, "qk_rope_head_dim")
    key = "qk_rope_head_dim"
    if fields.model_type not in _ROTATE_NO_WHOLE_HEAD:
        rotated, key = fields.head_dim, "head_dim"
    if rotated is not None and rotated % 2:
        raise fields.refusal(f"{key!r} is {rotated}; rotary positions need an even number")


def _single(fields: ConfigFields, key: str) -> int | None:
    """A size, None where it is missing or given layer by layer."""
    value = fields.value(key)
    return None if isinstance(value, list) else fields.optional_number(key, minimum=0)


def check_length(fields: ConfigFields, tokens: int, *, scaled: bool = False) -> str | None:
    """What must be said about sequences of so many tokens; None when there is nothing.

    Args:
        scaled: whether the job scales the model's positions for them.

    Raises:
        InputError: the model has a table of positions that ends before.
    """
    positions = _positions(fields)
    if positions is None or tokens <= positions:
        return None
    if fields.model_type in ("gpt2", "gpt_bigcode", "gpt_neo", "opt"):
        raise InputError(
            f"{tokens} tokens do not fit: {fields.name} has a table of {positions} positions; "
            f"set cutoff_len to {positions} or less"
        )
    if scaled:
        return None
    return (
        f"{tokens} tokens are more than the {positions} positions the model was made for; "
        "memory is counted all the same, but it has learned nothing about such distances, and its "
        "answers there are often worthless: set cutoff_len to as many, or rope_scaling: yarn"
    )


def _positions(fields: ConfigFields) -> int | None:
    """`max_position_embeddings`, or what rotary scaling makes of the original ones."""
    scaling = fields.value("rope_scaling") or fields.value("rope_parameters") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if not (_is_positive(original) and _is_positive(factor)):
        return fields.max_positions
    return max(fields.max_positions or 0, int(original * factor))
