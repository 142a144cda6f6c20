"""Reads the fields of a config.json under whatever name an architecture gives them.

Knows which words mean the same, and what transformers takes where published configs leave a field
out. Does not know files, and checks one field at a time.
"""

from __future__ import annotations

from typing import Any

from tightfit.errors import InputError

# Words for the same things, in families that are not in `DEFAULTS`.
_SYNONYMS = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    ),
    "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}

# The words of a family in `DEFAULTS` where it has others: all that transformers reads, no more.
_ONE_HEAD_WIDTH: dict[str, tuple[str, ...]] = {"head_dim": ()}
_ALL_HEADS_ALIKE = _ONE_HEAD_WIDTH | {"num_key_value_heads": ()}
_GPT: dict[str, tuple[str, ...]] = _ALL_HEADS_ALIKE | {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
_TWO_WORDS_FOR_EXPERTS: dict[str, tuple[str, ...]] = {
    "num_local_experts": ("num_local_experts", "num_experts"),
}
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "bloom": _ALL_HEADS_ALIKE
    | {
        "hidden_size": ("n_embed", "hidden_size"),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": ("seq_length",),
    },
    "deepseek_v2": {"num_local_experts": ("n_routed_experts", "num_experts")},
    "deepseek_v3": {"num_local_experts": ("n_routed_experts", "num_local_experts")},
    "falcon": _ONE_HEAD_WIDTH
    | {
        "hidden_size": ("n_embed", "hidden_size"),
        "num_key_value_heads": ("num_kv_heads",),
        "intermediate_size": ("ffn_hidden_size",),
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": _ALL_HEADS_ALIKE
    | {
        "num_hidden_layers": ("num_layers", "num_hidden_layers"),
        "num_attention_heads": ("num_heads", "num_attention_heads"),
    },
    "gpt_neox": _ALL_HEADS_ALIKE,
    "gpt_oss": _TWO_WORDS_FOR_EXPERTS,
    "gptj": _GPT,
    "mixtral": _TWO_WORDS_FOR_EXPERTS,
    "mpt": _ALL_HEADS_ALIKE
    | {
        "hidden_size": ("d_model", "hidden_size"),
        "num_hidden_layers": ("n_layers", "num_hidden_layers"),
        "num_attention_heads": ("n_heads", "num_attention_heads"),
        "max_position_embeddings": ("max_seq_len",),
    },
    "olmoe": _TWO_WORDS_FOR_EXPERTS,
    "opt": _ALL_HEADS_ALIKE | {"intermediate_size": ("ffn_dim",)},
    "qwen2_moe": {"num_local_experts": ("num_experts",)},
    "qwen3_moe": _TWO_WORDS_FOR_EXPERTS,
    "stablelm": _ONE_HEAD_WIDTH,
}

# The families with a closed form, and what transformers takes for fields that configs leave out.
# A size that is not here has no default: a config without it is refused. Flags are false unless
# named; key and value heads are as many as query heads unless named.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bloom": {"tie_word_embeddings": True},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "deepseek_v2": {
        "q_lora_rank": 1536,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
    "falcon": {"tie_word_embeddings": True, "multi_query": True, "parallel_attn": True},
    "gemma": {"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256},
    # The text parts of published Gemma 3 models say nothing about their vocabulary and heads.
    "gemma3_text": {
        "tie_word_embeddings": True,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "glm": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "gpt2": {"tie_word_embeddings": True, "max_position_embeddings": 1024},
    "gpt_bigcode": {
        "tie_word_embeddings": True,
        "multi_query": True,
        "max_position_embeddings": 1024,
    },
    "gpt_neo": {"tie_word_embeddings": True, "max_position_embeddings": 2048},
    "gpt_neox": {"attention_bias": True},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True},
    "gptj": {},
    "granite": {},
    "granitemoe": {},
    "llama": {},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "mpt": {"tie_word_embeddings": True},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {
        "tie_word_embeddings": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True,
        "max_position_embeddings": 2048,
    },
    "phi": {},
    "phi3": {},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16, "qkv_bias": True, "decoder_sparse_step": 1},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "decoder_sparse_step": 1},
    "smollm3": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"tie_word_embeddings": True, "num_key_value_heads": 2, "use_bias": True},
}

_LARGEST = 10**15


class ConfigFields:
    """The sizes in a config.json. Whoever inherits has a `name` and the `config`.

    Attributes:
        name: the model's, for messages.
        config: the content of config.json.
    """

    name: str
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers."""
        return str(self.config["model_type"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.number("hidden_size")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.number("num_hidden_layers")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.number("vocab_size")

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.number("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; as many as query heads unless attention is grouped."""
        return self.optional_number("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.optional_number("head_dim") or self.hidden_size // self.num_heads

    @property
    def intermediate_size(self) -> int:
        """Width inside the MLP."""
        return self.number("intermediate_size")

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding itself."""
        return self.flag("tie_word_embeddings")

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was made for; None when config.json does not say."""
        return self.optional_number("max_position_embeddings")

    def number(self, key: str, minimum: int = 1) -> int:
        """A size that the architecture cannot do without.

        Raises:
            InputError: it is missing, or no whole number of at least `minimum`.
        """
        value = self.optional_number(key, minimum)
        if value is None:
            word = self._words(key)[0]
            raise self.refusal(f"{word!r} is missing; a {self.model_type} model needs it")
        return value

    def optional_number(self, key: str, minimum: int = 1) -> int | None:
        """A size, or None where config.json and the family's defaults have none.

        Raises:
            InputError: it is no whole number of at least `minimum`.
        """
        value = self.value(key)
        if value is None:
            return None
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= _LARGEST:
            raise self.refusal(
                f"{key!r} must be a whole number of at least {minimum}, not {_short(value)}"
            )
        return int(value)

    def flag(self, key: str) -> bool:
        """A choice; false unless the family's default is true.

        Raises:
            InputError: it is neither true nor false.
        """
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"{key!r} must be true or false, not {_short(value)}")
        return bool(value)

    def value(self, key: str) -> Any:
        """A field under any of its names, at the top or in the text part of a model with several
        parts; then what transformers takes for the family; None where there is nothing.

        Raises:
            InputError: two names for it have different values.
        """
        words = self._words(key)
        text = self.config.get("text_config")
        for level in (self.config, text if isinstance(text, dict) else {}):
            found = {word: level[word] for word in words if word in level}
            values = list(found.values())
            if self.model_type in DEFAULTS and any(value != values[0] for value in values[1:]):
                raise self.refusal(f"{' and '.join(map(repr, found))} contradict each other")
            given = [value for value in values if value is not None]
            if given:
                return given[0]
        if any(word in self.config for word in words):
            return None  # an explicit null: "as many as heads", not the family's default
        return DEFAULTS.get(self.model_type, {}).get(key)

    def _words(self, key: str) -> tuple[str, ...]:
        if self.model_type in DEFAULTS:
            return _WORDS.get(self.model_type, {}).get(key, (key,))
        return _SYNONYMS.get(key, (key,))

    def refusal(self, problem: str) -> InputError:
        """The error to raise: what is wrong with this config.json."""
        return InputError(f"config.json of {self.name}: {problem}")


def _short(value: Any) -> str:
    """A value as a message can show it."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "so large a number"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
