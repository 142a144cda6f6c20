"""A tokenizer with more tokens than its model has rows for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.training.merging import merge_adapter
from tightfit.training.model import open_model
from tightfit.training.prepare import prepare

RunJob = Callable[..., Any]
NEW = ["<|start|>", "<|stop|>", "<|spare|>"]
LORA = {"finetuning_type": "lora", "lora_rank": 2}


@pytest.fixture
def model(fresh_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A tied model, and a tokenizer with tokens that it has no rows for."""
    rows = len(fresh_tokenizer)
    ids = {f"{n}_token_id": getattr(fresh_tokenizer, f"{n}_token_id") for n in ("bos", "eos")}
    config = LlamaConfig(
        vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    fresh_tokenizer.add_special_tokens({"additional_special_tokens": NEW})
    assert len(fresh_tokenizer) == rows + 3
    fresh_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def keys(model: Path, tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for n in range(6):
            messages = [{"role": "user", "content": f"{NEW[0]} number {n}?"}]
            messages += [{"role": "assistant", "content": f"It is {n}.{NEW[1]}"}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return {"model_name_or_path": str(model), "dataset": str(rows)}


def test_they_are_refused_by_name_unless_they_are_asked_for(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"token '<\|stop\|>', number .*resize_vocab: true"):
        prepare(Job(**keys, output_dir=str(tmp_path / "run"), max_steps=1))


def test_tokens_that_no_row_of_data_has_are_no_mistake(
    job: Callable[..., Job], model: Path
) -> None:
    prepare(job(model_name_or_path=str(model)))


def test_a_new_row_is_the_mean_of_those_there_are(model: Path) -> None:
    rows = len(load_file(model / "model.safetensors")["model.embed_tokens.weight"])
    opened, weights = open_model(model, torch.float32, {"vocab_size": rows + 3})
    by_transformers = AutoModelForCausalLM.from_pretrained(model)
    by_transformers.resize_token_embeddings(rows + 3)
    expected = by_transformers.get_input_embeddings().weight.detach()
    assert weights.grows
    for part in (slice(0, rows + 3), slice(rows - 2, rows + 1), slice(rows + 1, rows + 3)):
        values = torch.empty(part.stop - part.start, 32)
        weights("model.embed_tokens.weight", values, (part, slice(0, 32)))
        torch.testing.assert_close(values, expected[part], rtol=1e-3, atol=1e-3)  # it adds noise
    assert not open_model(model, torch.float32)[1].grows
    assert opened.config.vocab_size == rows + 3


def test_all_parameters_are_trained_with_them(
    run_job: RunJob, keys: dict[str, Any], tmp_path: Path
) -> None:
    """What is saved is a model with all rows, from which the run goes on."""
    keys |= {"resize_vocab": True, "output_dir": str(tmp_path / "run")}
    run = run_job(**keys, max_steps=4)
    saved = AutoModelForCausalLM.from_pretrained(run.result.checkpoint)
    assert saved.config.vocab_size == len(run.prepared.tokenizer)
    new = saved.get_input_embeddings().weight[-3:]
    assert not torch.equal(new[0], new[2])  # the last one is not in the data
    rest = run_job(**keys, max_steps=5, resume=True)
    assert [record.step for record in rest.result.records] == [5]


def test_adapters_have_them_in_whole_ends(
    run_job: RunJob, keys: dict[str, Any], tmp_path: Path
) -> None:
    keys |= LORA | {"resize_vocab": True}
    with pytest.raises(ValueError, match="set additional_target: embed_tokens,lm_head"):
        Job(**keys)
    with pytest.raises(ConfigError, match=r"in model.embed_tokens would stay .* add embed_tokens"):
        run_job(**keys, additional_target="norm", output_dir=str(tmp_path / "norm"))
    run = run_job(**keys, additional_target="embed_tokens", output_dir=str(tmp_path / "run"))
    checkpoint = run.result.checkpoint
    base = AutoModelForCausalLM.from_pretrained(keys["model_name_or_path"])
    base.resize_token_embeddings(len(run.prepared.tokenizer))
    ids = torch.arange(5, len(run.prepared.tokenizer))[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, checkpoint).eval()(input_ids=ids).logits
        merged = merge_adapter(checkpoint, tmp_path / "merged")
        model = AutoModelForCausalLM.from_pretrained(merged.folder).eval()
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert not merged.untied
    rest = run_job(
        **keys, additional_target="embed_tokens", output_dir=str(tmp_path / "run"),
        max_steps=5, resume=True,
    )  # fmt: skip
    assert [record.step for record in rest.result.records] == [5]
