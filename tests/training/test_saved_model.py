"""Adapters, and what is trained beside them, are in peft's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.taken import every
from transformers import AutoModelForCausalLM

from tightfit.engine.engine import Engine
from tightfit.training import leg

RunJob = Callable[..., Any]
LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 2e-2}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that runs made, in order."""
    made: list[Engine] = []
    fit = leg.fit

    def remember(*arguments: Any, **keys: Any) -> Engine:
        made.append(fit(*arguments, **keys))
        return made[-1]

    monkeypatch.setattr(leg, "fit", remember)
    return made


@pytest.mark.parametrize(
    "keys",
    every(
        2,
        [
            {"use_rslora": True, "additional_target": "embed_tokens,norm"},
            {"additional_target": "lm_head", "precision": "bf16", "quantization_bit": 4},
        ],
    ),
)
def test_peft_loads_a_checkpoint(
    run_job: RunJob, engines: list[Engine], keys: dict[str, Any]
) -> None:
    """Of a tied model with one end that is trained whole: it is the other end, too."""
    run = run_job(**LORA | keys)
    assert run.losses[-1] < run.losses[0]
    base = AutoModelForCausalLM.from_pretrained(run.prepared.job.model_name_or_path)
    loaded = PeftModel.from_pretrained(base, run.result.checkpoint)
    saved = load_file(run.result.checkpoint / "adapter_model.safetensors")
    ends = [saved[f"base_model.model.{n}.weight"] for n in ("model.embed_tokens", "lm_head")]
    assert torch.equal(*ends)
    assert loaded.base_model.model.lm_head.weight is loaded.get_input_embeddings().weight
    if "quantization_bit" not in keys:
        ids = torch.arange(5, 12)[None]
        with torch.no_grad():
            logits = engines[0].model.eval()(input_ids=ids).logits
            torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, logits)
