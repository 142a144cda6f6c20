"""Closed forms against the models that transformers builds, and LoRA counts against peft's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tightfit.errors import ConfigError, InputError
from tightfit.facts.catalogue import catalogue_names, find_in_catalogue
from tightfit.facts.config_fields import DEFAULTS
from tightfit.facts.families import closed_form_families
from tightfit.facts.model_spec import ModelSpec
from tightfit.facts.parameter_count import (
    LayerParameters,
    Linear,
    ParameterCounts,
    StackedWeights,
    lora_parameters,
    quantisable_parameters,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
# What each family needs or takes beside SIZES, one case a line.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bloom", {}),
    ("cohere", {}),
    ("cohere", {"use_qk_norm": True, "num_key_value_heads": 2}),
    ("cohere2", {"num_key_value_heads": 2}),
    ("deepseek_v2", DEEPSEEK),
    ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", DEEPSEEK | {"first_k_dense_replace": 9}),
    ("falcon", {}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    ("falcon", {"ffn_hidden_size": 80, "tie_word_embeddings": False}),
    ("gemma", {"num_key_value_heads": 1}),
    ("gemma", {"num_key_value_heads": 2, "head_dim": 24, "attention_bias": True}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("glm", {}),
    ("glm", {"attention_bias": False, "num_key_value_heads": 4, "head_dim": 16}),
    ("glm4", {}),
    ("gpt2", {"n_positions": 32}),
    ("gpt2", {"head_dim": 8, "num_key_value_heads": 2}),  # which it does not know
    ("gpt2", {"n_inner": 80, "tie_word_embeddings": False}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neo", {"attention_types": [[["global"], 3]]}),
    ("gpt_neox", {}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_bias": False}
     | {"num_key_value_heads": 4}),
    ("gptj", {"rotary_dim": 8}),
    ("granite", {"attention_bias": True}),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("llama", {}),
    ("llama", {"num_key_value_heads": 2}),
    ("llama", {"num_key_value_heads": None, "head_dim": 24}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("ministral3", {"num_attention_heads": 8}),
    ("mistral", {"num_attention_heads": 8}),
    ("mistral", {"num_key_value_heads": 2}),
    ("mixtral", {"num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("mpt", {}),
    ("olmo", {"num_key_value_heads": 2}),
    ("olmo2", {"num_key_value_heads": 2}),
    ("olmo3", {"num_key_value_heads": 2}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("opt", {"ffn_dim": 80, "max_position_embeddings": 32}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("phi", {"num_key_value_heads": 2}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {"num_key_value_heads": 2}),
    ("phimoe", {"num_attention_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "phimoe",
        {"num_key_value_heads": 2, "num_local_experts": 4, "attention_bias": True}
        | {"lm_head_bias": True, "num_experts_per_tok": 2},
    ),
    ("qwen2", {"num_key_value_heads": 2}),
    ("qwen2", {"num_key_value_heads": None}),
    ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 80}
     | {"num_key_value_heads": 2}),
    ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 80}
     | {"num_key_value_heads": 4, "qkv_bias": False, "decoder_sparse_step": 2}),
    ("qwen3", {"num_key_value_heads": 1}),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    ("qwen3_moe", EXPERTS | {"num_experts": 4}),
    ("qwen3_moe", EXPERTS | {"num_experts": 4, "mlp_only_layers": [1], "head_dim": 24}),
    ("smollm3", {}),
    ("stablelm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    ("stablelm", {"num_key_value_heads": 4, "qk_layernorm": True, "use_parallel_residual": True}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
]  # fmt: skip


def tiny(model_type: str, differences: dict[str, Any]) -> dict[str, Any]:
    """A small config in the words of its family; without a word the width is four times hidden."""
    sizes = dict(SIZES)
    width = sizes.pop("intermediate_size")
    if model_type not in ("bloom", "falcon", "gpt2", "gpt_bigcode", "gptj", "mpt"):
        sizes["ffn_dim" if model_type == "opt" else "intermediate_size"] = width
    return {"model_type": model_type, **sizes, **differences}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec("a test", "folder", config)


def counts_of(config: dict[str, Any]) -> ParameterCounts:
    counts = spec_of(config).parameter_counts()
    assert counts is not None
    return counts


def build(config: dict[str, Any], device: str = "meta") -> PreTrainedModel:
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields)
        )
    assert isinstance(model, PreTrainedModel)
    return model


def size(module: nn.Module) -> int:
    """Parameters, a tied one once."""
    return sum(parameter.numel() for parameter in module.parameters())


def linears_of(model: PreTrainedModel) -> Counter[Linear]:
    found: Counter[Linear] = Counter()
    for path, module in model.named_modules():
        if module is model.get_output_embeddings():
            continue
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight if isinstance(module, Conv1D) else module.weight.T
            name = path.rpartition(".")[2]
            found[Linear(name, *weight.shape, bias=module.bias is not None)] += 1
    return found


def assert_agrees(config: dict[str, Any]) -> None:
    counts, model = counts_of(config), build(config)
    depth = len(counts.layers)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
    assert [layer.total for layer in counts.layers] == [size(layer) for layer in layers]
    assert counts.embedding == size(model.get_input_embeddings())
    assert counts.total == size(model)
    linears = Counter(linear for part in counts.parts for linear in part.linears)
    assert linears == linears_of(model)


def with_depth(config: dict[str, Any], depth: int) -> dict[str, Any]:
    keys = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    cut = config | {key: depth for key in keys if key in config}
    if "attention_types" in config:
        cut["attention_types"] = [[["global"], depth]]
    return cut


def shapes(config: dict[str, Any]) -> str:
    """What parameters depend on: no other numbers, no depth."""
    others = ("max_position_embeddings", "sliding_window", "eos_token_id", "bos_token_id")
    kept = {
        key: value
        for key, value in with_depth(config, 0).items()
        if isinstance(value, int | str) and key not in others
    }
    return repr(sorted(kept.items()))


def distinct_architectures() -> list[str]:
    """One name of the catalogue for every set of shapes in it."""
    configs = {}
    for name in catalogue_names():
        entry = find_in_catalogue(name)
        assert entry is not None
        configs.setdefault(shapes(entry.config), name)
    return list(configs.values())


@pytest.mark.parametrize("name", distinct_architectures())
def test_catalogue_agrees_with_transformers(name: str) -> None:
    entry = find_in_catalogue(name)
    assert entry is not None
    dense_first = entry.config.get("first_k_dense_replace", 0)
    assert_agrees(with_depth(entry.config, 2 + dense_first))


@pytest.mark.parametrize(("model_type", "differences"), CASES)
def test_closed_form_agrees_with_transformers(model_type: str, differences: dict[str, Any]) -> None:
    assert_agrees(tiny(model_type, differences))


def test_every_family_is_tried_and_has_defaults() -> None:
    assert {model_type for model_type, _ in CASES} == set(closed_form_families())
    assert set(DEFAULTS) == set(closed_form_families())


def test_other_families_have_no_closed_form() -> None:
    assert spec_of({"model_type": "mamba", **SIZES}).parameter_counts() is None


def test_the_sums() -> None:
    """One dense layer of 14 + 3, one with two experts of 6, of which a token uses one."""
    dense = LayerParameters(linears=(Linear("up", 2, 4, bias=True), Linear("down", 1, 2)), other=3)
    experts = LayerParameters(stacked=(StackedWeights(2, 2, 3),), idle=6)
    counts = ParameterCounts(10, 20, LayerParameters(other=5), (dense, dense + experts))
    assert (dense.total, dense.active) == (17, 17)
    assert (counts.layers[1].total, counts.layers[1].active) == (29, 23)
    assert (counts.other, counts.largest_layer) == (5, 29)
    assert (counts.total, counts.active) == (81, 75)
    assert quantisable_parameters(counts) == 20


QWEN3_MOE = SIZES | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4}
LORA: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "llama", **SIZES}, []),
    ({"model_type": "llama", **SIZES}, ["q_proj", "v_proj"]),
    ({"model_type": "llama", **SIZES, "num_key_value_heads": 2}, ["k_proj", "down_proj"]),
    ({"model_type": "gpt2", **SIZES, "n_inner": 96}, []),
    ({"model_type": "gpt2", **SIZES, "n_inner": 96}, ["c_attn"]),
    ({"model_type": "phi3", **SIZES}, ["qkv_proj"]),
    ({"model_type": "phi", **SIZES}, []),
    ({"model_type": "opt", **SIZES, "ffn_dim": 96, "word_embed_proj_dim": 16}, []),
    (QWEN3_MOE, []),
    (QWEN3_MOE, ["q_proj", "o_proj"]),
    (QWEN3_MOE, ["gate_proj", "up_proj", "down_proj"]),
    (QWEN3_MOE | {"mlp_only_layers": [1]}, []),
    ({"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_key_value_heads": 2}, []),
    ({"model_type": "deepseek_v3", **SIZES, **DEEPSEEK}, []),
    ({"model_type": "deepseek_v2", **SIZES, **DEEPSEEK}, ["kv_b_proj", "down_proj"]),
    (
        {"model_type": "qwen2_moe", **SIZES, **EXPERTS, "num_experts": 4}
        | {"shared_expert_intermediate_size": 80, "num_key_value_heads": 4},
        [],
    ),
    ({"model_type": "gpt_oss", **SIZES, "num_local_experts": 4, "num_key_value_heads": 2}, []),
    ({"model_type": "phimoe", **SIZES, "num_local_experts": 4, "num_key_value_heads": 2}, []),
]


def peft_parameters(config: dict[str, Any], targets: list[str], *, dora: bool) -> int:
    model = build(config, "cpu")
    lora = LoraConfig(
        r=4,
        lora_dropout=0.0,
        target_modules=targets or "all-linear",
        fan_in_fan_out=config["model_type"] == "gpt2",
        use_dora=dora,
        task_type="CAUSAL_LM",
    )
    adapted: Any = get_peft_model(model, lora)
    trainable, _ = adapted.get_nb_trainable_parameters()
    return int(trainable)


# peft 0.21 looks for the doubled rank of stacked experts among modules only, and uses it anyway.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(("config", "targets"), LORA)
def test_lora_counts_are_those_of_peft(config: dict[str, Any], targets: list[str]) -> None:
    config = config | {"num_experts_per_tok": 2}
    expected = peft_parameters(config, targets, dora=False)
    assert lora_parameters(counts_of(config), 4, targets) == expected


def test_dora_counts_are_those_of_peft() -> None:
    config = {"model_type": "llama", **SIZES, "num_key_value_heads": 2}
    expected = peft_parameters(config, [], dora=True)
    assert lora_parameters(counts_of(config), 4, dora=True) == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "qkv"], "lora_target qkv: no such module.* k_proj, "),
        (["gate_proj"], "lora_target gate_proj: .* gate_proj and up_proj in one tensor"),
    ],
)
def test_targets_that_are_not_there(targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_parameters(counts_of(QWEN3_MOE), 4, targets)


def test_quantised_weights_leave_out_the_output_layer_and_stacked_experts() -> None:
    counts = counts_of(QWEN3_MOE)
    attention = 2 * 64 * (4 + 4) * 16  # four query heads, four of keys and values
    assert quantisable_parameters(counts) == 3 * attention


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "'hidden_size' is missing; a llama model needs it"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "'mlp_only_layers' must be a list"),
        (QWEN3_MOE | {"attention_bias": "yes"}, "'attention_bias' must be true or false"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be"),
    ],
)
def test_fields_that_make_no_sense(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        spec_of(config).parameter_counts()
