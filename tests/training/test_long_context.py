"""Sequences that are longer than a model was made for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
)

from tightfit.engine.apply import fit
from tightfit.errors import ConfigError, InputError
from tightfit.facts.job import Job
from tightfit.facts.model_spec import ModelSpec
from tightfit.policies import Policies
from tightfit.training.long_context import scaled_positions
from tightfit.training.model import open_model
from tightfit.training.prepare import prepare

RunJob = Callable[..., Any]
KINDS = ["linear", "dynamic", "yarn"]
MADE_FOR = 32


def scaled(config: Any, **keys: Any) -> dict[str, Any]:
    spec = ModelSpec("m", "folder", config.to_dict())
    return scaled_positions(Job(model_name_or_path="m", **keys), spec, config)


def llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MADE_FOR, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_factor_is_the_next_whole_one(kind: str) -> None:
    found = scaled(llama(), cutoff_len=3 * MADE_FOR - 5, rope_scaling=kind)
    assert found["rope_parameters"]["factor"] == 3
    config = llama()
    config.update(found)
    again = scaled(config, cutoff_len=3 * MADE_FOR - 5, rope_scaling=kind)
    assert again == {}, "a model that was saved is scaled already"


@pytest.mark.parametrize("keys", [{"rope_scaling": "yarn"}, {}])
def test_nothing_changes_where_nothing_must(keys: dict[str, Any]) -> None:
    assert scaled(llama(), cutoff_len=MADE_FOR if keys else 2 * MADE_FOR, **keys) == {}


def test_what_cannot_be_scaled_is_refused() -> None:
    own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=r"scales its positions already \(linear\), to 32"):
        scaled(llama(rope_parameters=own), cutoff_len=100, rope_scaling="yarn")
    with pytest.raises(ConfigError, match="gemma3_text model does not rotate all its layers by"):
        scaled(Gemma3TextConfig(), cutoff_len=200_000, rope_scaling="yarn")
    with pytest.raises(InputError, match="table of 1024 positions"):
        scaled(GPT2Config(), cutoff_len=2000, rope_scaling="yarn")


@pytest.fixture
def short(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model, as if it had been made for fewer tokens than rows have."""
    folder = tmp_path / "short"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = MADE_FOR
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_computes_what_transformers_does(short: Path, kind: str) -> None:
    config = AutoConfig.from_pretrained(short)
    fields = scaled(config, cutoff_len=2 * MADE_FOR, rope_scaling=kind)
    model, weights = open_model(short, torch.float32, fields)
    engine = fit(model, Policies(), values=weights)
    config.update(fields)
    plain = AutoModelForCausalLM.from_pretrained(short, config=config).eval()
    unscaled = AutoModelForCausalLM.from_pretrained(short).eval()
    tokens = torch.arange(2 * MADE_FOR)[None] % config.vocab_size
    with torch.no_grad(), engine.evaluating():
        logits = engine.model(input_ids=tokens).logits
        torch.testing.assert_close(logits, plain(input_ids=tokens).logits)
        assert not torch.allclose(logits, unscaled(input_ids=tokens).logits)


def test_a_run_saves_a_model_that_is_scaled(short: Path, run_job: RunJob) -> None:
    keys = {"model_name_or_path": str(short), "cutoff_len": 3 * MADE_FOR}
    run = run_job(**keys, rope_scaling="yarn", max_steps=2)
    assert run.prepared.too_long is None
    saved = AutoConfig.from_pretrained(run.result.checkpoint)
    assert saved.rope_parameters["rope_type"] == "yarn"
    assert saved.rope_parameters["factor"] == 3
    assert saved.max_position_embeddings == 3 * MADE_FOR
    rest = run_job(**keys, rope_scaling="yarn", max_steps=3, resume=True)
    assert [record.step for record in rest.result.records] == [3]


def test_without_it_the_run_says_what_happens(short: Path, job: Callable[..., Job]) -> None:
    prepared = prepare(job(model_name_or_path=str(short), cutoff_len=3 * MADE_FOR))
    assert prepared.too_long is not None
    assert "more than the 32 positions the model was made for" in prepared.too_long
    assert "rope_scaling: yarn" in prepared.too_long
    assert prepare(job(model_name_or_path=str(short), cutoff_len=MADE_FOR)).too_long is None
