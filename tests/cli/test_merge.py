from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tightfit.cli.main import main


@pytest.fixture
def adapter(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """On the output layer of the tiny model, which is its embedding."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    config = LoraConfig(target_modules=["lm_head"], ensure_weight_tying=False)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        adapted = get_peft_model(model, config)
    torch.nn.init.normal_(adapted.get_output_embeddings().lora_B["default"].weight)
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_it_says_what_the_merged_model_is(
    adapter: Path, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert main(["merge", str(adapter), str(out), "--precision", "bf16"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tiny_model_folder} with the adapter of {adapter}, merged in bfloat16"
    assert said[1].startswith("logits of 16 tokens differ from those of base and adapter by up to")
    assert "without the rounding of merged weights to bfloat16" in said[2]
    assert "the merged model has both matrices (tie_word_embeddings: false)" in said[3]
    assert said[4] == f"written: {out}"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in out.iterdir()}


def test_mistakes(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the folders, and of the base: nothing is left behind."""
    base = "--model_name_or_path", str(tmp_path / "none")
    for words, message in (
        ([str(adapter), str(adapter)], "is there already; name a folder that is new"),
        ([str(tmp_path), str(tmp_path / "out")], "holds no adapter: it has no adapter_config.json"),
        ([str(adapter), str(tmp_path / "out"), *base], "is neither a folder nor in the Hub cache"),
    ):
        assert main(["merge", *words]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
