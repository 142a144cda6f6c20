"""A merged adapter is a model that computes what the base computes with the adapter beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.taken import every
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tightfit.engine.quantisation import dequantised_again, linear_layers
from tightfit.errors import ConfigError, InputError, TrainingError, UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import QuantisationPolicy, Tier
from tightfit.training.adapter_on_base import AdapterOnBase
from tightfit.training.merging import Merged, merge_adapter

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 4}
TOKENS = torch.arange(3, 40)[None]
# peft's, of what is done here on purpose.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("Model has `tie", "Model with `tie", "Setting `s", "fan_in", "The following")
]


@pytest.fixture
def base(tmp_path: Path) -> Callable[..., Path]:
    """Saves a random model of these fields, and gives its folder."""

    def make(model_type: str = "llama", dtype: str = "float32", **fields: Any) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SIZES | fields)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return make


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def adapt(base: Path, **fields: Any) -> Path:
    """Saves an adapter that changes much, as peft does."""
    fields = {"r": 4, "lora_alpha": 16, "init_lora_weights": False, **fields}
    adapted = get_peft_model(load(base), LoraConfig(**fields, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    folder = base.with_name("adapter")
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def merged(base: Path, adapter: Path, **options: Any) -> tuple[PreTrainedModel, Merged]:
    """The merged model as transformers loads it, held against peft's model of the two."""
    found = merge_adapter(adapter, base.with_name("merged"), **options)
    model = load(found.folder)
    expected = logits(PeftModel.from_pretrained(load(base), adapter).eval())
    # Of other tokens than were checked.
    difference = (logits(model) - expected).abs().max().item()
    exact = found.dtype is torch.float32
    assert max(difference, found.difference) <= (found.allowed if exact else found.change / 2)
    assert found.error <= found.allowed < found.change
    assert sorted(p.name for p in found.folder.parent.iterdir()) == ["adapter", "base", "merged"]
    return model, found


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 4},
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2}},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "norm"]},
    ],
    ids=["lora", "rslora", "dora", "ends", "whole"],
)
def test_it_computes_what_base_and_adapter_do(
    base: Callable[..., Path], fields: dict[str, Any]
) -> None:
    folder = base()
    _, found = merged(folder, adapt(folder, **fields))
    assert (found.dtype, found.untied, found.base) == (torch.float32, False, str(folder))


@pytest.mark.parametrize("model", ["gpt2", "qwen3_moe"])
def test_models_whose_layers_are_of_another_kind(base: Callable[..., Path], model: str) -> None:
    """GPT-2's are `[in, out]`; experts are one tensor here and one by one in files."""
    folder = base(
        model, **({"n_embd": 16, "n_layer": 2, "n_head": 2} if model == "gpt2" else EXPERTS)
    )
    merged(folder, adapt(folder, target_modules="all-linear"))


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_of_a_tied_model_only_the_intended_matrix_changes(
    base: Callable[..., Path], end: str
) -> None:
    """What peft merges itself is another model: it adds to the one matrix that both ends are."""
    folder = base(tie_word_embeddings=True)
    adapter = adapt(folder, target_modules=[end, "q_proj"])
    model, found = merged(folder, adapter)
    before = load(folder).get_input_embeddings().weight
    ends = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    assert found.untied
    assert not model.config.tie_word_embeddings
    for name, module in ends.items():
        assert torch.equal(module.weight, before) == (name != end)
    by_peft = PeftModel.from_pretrained(load(folder), adapter).eval()
    expected = logits(by_peft)
    wrong = logits(by_peft.merge_and_unload()) - expected
    assert wrong.abs().max() > 10 * found.allowed


@pytest.mark.parametrize(
    "ends", every(3, [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
)
def test_whole_ends_that_peft_has_untied_are_untied(
    base: Callable[..., Path], ends: list[str]
) -> None:
    folder = base(tie_word_embeddings=True)
    _, found = merged(folder, adapt(folder, target_modules=["q_proj"], modules_to_save=ends))
    assert found.untied


@pytest.mark.parametrize(
    ("stored", "precision", "written"),
    every(3, [("bfloat16", "auto", torch.bfloat16), ("bfloat16", "fp32", torch.float32),
              ("float32", "bf16", torch.bfloat16)]),
)  # fmt: skip
def test_types(
    base: Callable[..., Path], stored: str, precision: str, written: torch.dtype
) -> None:
    folder = base(dtype=stored)
    _, found = merged(folder, adapt(folder, target_modules="all-linear"), precision=precision)
    assert found.dtype is written
    config = json.loads((found.folder / "config.json").read_text())
    assert config["dtype"] == str(written).removeprefix("torch.")


def test_a_base_of_4_bits_is_dequantised_first(base: Callable[..., Path], tmp_path: Path) -> None:
    folder = base()
    adapter = adapt(folder, target_modules="all-linear")
    model = load(folder)
    with torch.no_grad():
        for parent, name in linear_layers(model):
            weight = getattr(parent, name).weight
            weight.copy_(dequantised_again(weight, QuantisationPolicy()))
    expected = logits(PeftModel.from_pretrained(model, adapter).eval())
    found = merge_adapter(adapter, tmp_path / "merged", bits=4)
    torch.testing.assert_close(logits(load(found.folder)), expected, rtol=1e-4, atol=1e-4)
    assert found.difference <= found.allowed


def test_no_more_than_a_few_tensors_are_in_memory(base: Callable[..., Path]) -> None:
    folder = base(num_hidden_layers=12, hidden_size=64, intermediate_size=128)
    adapter = adapt(folder, target_modules="all-linear", r=1)
    size = (folder / "model.safetensors").stat().st_size
    with Ledger() as counted:
        merge_adapter(adapter, folder.with_name("merged"))
        peak = counted.peak_bytes(Tier.DEVICE) + counted.peak_bytes(Tier.HOST)
    own = (adapter / "adapter_model.safetensors").stat().st_size
    assert peak < own + size / 6


def test_one_that_computes_something_else_is_not_kept(
    base: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base()
    adapter = adapt(folder, target_modules="all-linear")
    monkeypatch.setattr(AdapterOnBase, "merged", lambda self, name: self.base(name))
    with pytest.raises(TrainingError, match=r"other logits than .*are off by up to .*not kept$"):
        merge_adapter(adapter, folder.with_name("merged"))
    assert sorted(p.name for p in folder.parent.iterdir()) == ["adapter", "base"]


def test_what_cannot_be_merged(base: Callable[..., Path], tmp_path: Path) -> None:
    folder = base(tie_word_embeddings=True)
    adapter = adapt(folder, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="is there already"):
        merge_adapter(adapter, folder)
    with pytest.raises(InputError, match=r"holds no adapter: it has no adapter_config.json"):
        merge_adapter(folder, tmp_path / "merged")
    other = base(hidden_size=8)
    with pytest.raises(InputError, match=r"q_proj.*is of shape \[4, 16\] where \[4, 8\] is wanted"):
        merge_adapter(adapter, tmp_path / "merged", base=str(other))
    base(tie_word_embeddings=True)
    adapt(folder, target_modules=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(UnsupportedError, match=r"one adapter for both model.embed_tokens and lm_h"):
        merge_adapter(adapter, tmp_path / "merged")
