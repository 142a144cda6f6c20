"""What a config.json may not say, and what must be said of long sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tightfit.errors import InputError
from tightfit.facts.config_checks import check_config, check_length
from tightfit.facts.config_fields import DEFAULTS
from tightfit.facts.model_spec import ModelSpec, load_model_spec

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
OTHER = TINY | {"model_type": "some-new-family"}


GEMMA3 = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 32},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
    },
}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'model_type'"),
        (TINY | {"model_type": 3}, "no 'model_type'"),
        (TINY | {"hidden_size": None}, "'hidden_size' is missing; a llama model needs it"),
        (without(TINY, "intermediate_size"), "'intermediate_size' is missing"),
        (without(TINY, "vocab_size"), "'vocab_size' is missing"),
        (without(GPT2, "n_head"), "'n_head' is missing; a gpt2 model"),
        (without(MOE, "num_experts"), "'num_local_experts' is missing"),
        (GPT2 | {"hidden_size": 32}, "'n_embd' and 'hidden_size' contradict each other"),
        (TINY | {"text_config": {}}, "a llama model has no parts, but there is 'text_config'"),
        (TINY | {"text_config": []}, "'text_config' must be an object"),
        (TINY | {"pad_token_id": 100}, "'pad_token_id' is 100, but 'vocab_size' is 100"),
        (TINY | {"quantization_config": "awq"}, "'quantization_config' must be an object"),
        (TINY | {"layer_types": [1, None]}, "'layer_types' must be a list of words or numbers"),
        (TINY | {"num_hidden_layers": -2}, "'num_hidden_layers' must be .* at least 1, not -2"),
        (TINY | {"vocab_size": "100"}, "'vocab_size' must be a whole number .*, not '100'"),
        (TINY | {"vocab_size": 1e2}, "not 100.0"),
        (TINY | {"vocab_size": True}, "not True"),
        (TINY | {"vocab_size": 10**30}, "not so large a number"),
        (TINY | {"hidden_size": [64, 64]}, r"not \[64, 64\]"),
        (TINY | {"num_hidden_layers": 10**6}, "no model has so many layers"),
        (TINY | {"num_attention_heads": 5}, "'hidden_size' 64 is not a multiple of .* 5"),
        (OTHER | {"num_attention_heads": 5}, "'hidden_size' 64 is not a multiple of .* 5"),
        (GPT2 | {"n_head": 5}, "'hidden_size' 64 is not a multiple of .* 5"),
        (TINY | {"num_key_value_heads": 3}, "'num_attention_heads' 4 is not a multiple of .* 3"),
        (OTHER | {"num_key_value_heads": 3}, "'num_attention_heads' 4 is not a multiple of .* 3"),
        (TINY | {"head_dim": 15}, "'head_dim' is 15; rotary positions need an even number"),
        (TINY | {"num_attention_heads": 64}, "'head_dim' is 1; rotary"),
        (MOE | {"num_experts_per_tok": 5}, "'num_experts_per_tok' is 5, but there are 4 experts"),
        (OTHER | {"num_experts": 4, "num_experts_per_tok": 5}, "but there are 4 experts"),
        (TINY | {"layer_types": ["full_attention"]}, "'layer_types' describes 1 layers, but"),
        (OTHER | {"layer_types": ["full_attention"]}, "'layer_types' describes 1 layers, but"),
        (TINY | {"layer_types": "full_attention"}, "'layer_types' must be a list"),
        (TINY | {"rope_theta": "big"}, "'rope_theta' must be a number above 0, not 'big'"),
        (TINY | {"rms_norm_eps": -1e-6}, "'rms_norm_eps' must be a number above 0"),
        (TINY | {"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number above 0"),
        (TINY | {"rope_scaling": 2}, "'rope_scaling' must be an object"),
        (TINY | {"sliding_window": -1}, "'sliding_window' must be"),
        (TINY | {"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false"),
        (TINY | {"quantization_config": {"quant_method": "awq"}}, r"already quantised \(awq\)"),
        (OTHER | {"compression_config": {"format": "x"}}, r"already quantised \(unknown\)"),
        (
            GEMMA3 | {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
            r"already quantised \(fp8\)",
        ),
        (GEMMA3 | {"text_config": {"hidden_size": 0}}, "'hidden_size' must be"),
        (GPT2 | {"n_layer": 0}, "'num_hidden_layers' must be"),
    ],
)
def test_broken_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_config(ModelSpec("./tiny", "folder", config))
    assert str(caught.value).startswith("config.json of ./tiny: ")
    assert caught.value.exit_code == 2


SOMETHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(["full_attention", "", "4", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = [
    *("hidden_size", "n_embd", "intermediate_size", "num_hidden_layers", "n_layer", "n_head"),
    *("num_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "n_positions", "n_inner", "ffn_dim", "ffn_hidden_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"),
    *("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_types"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "multi_query", "rope_theta"),
    *("rope_scaling", "rope_parameters", "sliding_window", "rms_norm_eps", "text_config"),
    *("quantization_config", "word_embed_proj_dim", "num_ln_in_parallel_attn", "no_rope_layers"),
]
FAMILIES = st.sampled_from([*DEFAULTS, "some-new-family"])


def refusal_of(action: Callable[[], object]) -> str | None:
    """What an input error of the action says; None when it works."""
    try:
        action()
    except InputError as error:
        return str(error)
    return None


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@example("some-new-family", TINY, {"hidden_size": None, "max_position_embeddings": []}, 1)
@given(
    model_type=FAMILIES,
    base=st.sampled_from([TINY, GPT2, MOE, {}]),
    changes=st.dictionaries(st.sampled_from(KEYS), SOMETHING, max_size=6),
    tokens=st.integers(1, 10**7),
)
def test_any_config_is_a_spec_or_an_input_error(
    model_type: str, base: dict[str, Any], changes: dict[str, Any], tokens: int
) -> None:
    spec = ModelSpec("fuzzed", "folder", base | changes | {"model_type": model_type})
    refused = refusal_of(lambda: check_config(spec))
    if refused:
        assert "config.json of fuzzed" in refused
        return
    counts = spec.parameter_counts()
    if counts is not None:
        assert 0 < counts.active <= counts.total
        assert len(counts.layers) == spec.num_layers
        assert spec.head_dim > 0
    too_long = refusal_of(lambda: check_length(spec, tokens))
    # Too many tokens, or a number of positions that is none.
    assert too_long is None or "position" in too_long


@pytest.mark.parametrize("width", [{"head_dim": 10}, {"qk_rope_head_dim": 8}])
def test_heads_with_a_width_of_their_own_need_not_divide(width: dict[str, int]) -> None:
    check_config(ModelSpec("m", "folder", OTHER | {"num_attention_heads": 5} | width))


@pytest.mark.parametrize(
    ("name", "tokens", "said"),
    [
        ("Qwen/Qwen3-8B", 40960, None),
        ("Qwen/Qwen3-8B", 40961, "40961 tokens are more than the 40960 positions the model was"),
        ("bigscience/bloom-560m", 4096, "4096 tokens are more than the 2048 positions"),
        ("tiiuae/falcon-7b", 2049, "2049 tokens"),
        ("meta-llama/Llama-3.1-8B", 131072, None),
        ("openai-community/gpt2", 1024, None),
        ("facebook/opt-1.3b", 2048, None),
    ],
)
def test_longer_than_the_positions(name: str, tokens: int, said: str | None) -> None:
    found = check_length(load_model_spec(name, Path("/nowhere")), tokens)
    assert (found is None) == (said is None)
    assert said is None or (found or "").startswith(said)


@pytest.mark.parametrize(
    ("name", "positions"),
    [("gpt2", 1024), ("facebook/opt-1.3b", 2048), ("EleutherAI/gpt-neo-125m", 2048)],
)
def test_a_table_of_positions_ends(name: str, positions: int) -> None:
    spec = load_model_spec(name, Path("/nowhere"))
    with pytest.raises(InputError, match=f"table of {positions} positions; set cutoff_len to"):
        check_length(spec, positions + 1)


def test_a_job_that_scales_positions_need_not_be_told_to() -> None:
    rotary, table = (load_model_spec(name, Path("/nowhere")) for name in ("Qwen/Qwen3-8B", "gpt2"))
    assert check_length(rotary, 40961)
    assert check_length(rotary, 40961, scaled=True) is None
    with pytest.raises(InputError, match="table of 1024 positions"):
        check_length(table, 1025, scaled=True)


def test_rotary_scaling_gives_more_positions() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = TINY | {"max_position_embeddings": 32768}
    assert check_length(ModelSpec("m", "folder", config), 100_000) is not None
    assert (
        check_length(ModelSpec("m", "folder", config | {"rope_scaling": scaling}), 100_000) is None
    )


def test_without_positions_any_length_will_do() -> None:
    assert check_length(ModelSpec("m", "folder", TINY), 10**6) is None
