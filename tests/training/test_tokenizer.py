"""A tokenizer loads with a pad token, or the error says where it was looked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tightfit.errors import ModelNotFoundError
from tightfit.training.tokenizer import load_tokenizer


def test_loads_from_a_model_folder(
    tiny_model_folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load_tokenizer(tiny_model_folder)
    assert loaded("some text")["input_ids"] == tokenizer("some text")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("eos", "pad"), [("<|im_end|>", "<|im_end|>"), (None, "<|endoftext|>")])
def test_there_is_always_a_pad_token(
    tmp_path: Path, fresh_tokenizer: PreTrainedTokenizerFast, eos: str | None, pad: str
) -> None:
    fresh_tokenizer.pad_token = None
    fresh_tokenizer.eos_token = eos
    fresh_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == pad


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelNotFoundError, match=r"looked for tokenizer\.json.* found config\.json"
    ):
        load_tokenizer(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path}/gone is not a folder"):
        load_tokenizer(tmp_path / "gone")


@pytest.mark.parametrize("content", ['{"x": ', '{"x": 1}'])
def test_broken_tokenizer(tmp_path: Path, tiny_model_folder: Path, content: str) -> None:
    shutil.copy(tiny_model_folder / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path)


def test_unknown_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **_: object) -> None:
        raise OSError(f"{name} is not in the cache\nmore lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ModelNotFoundError, match=r"'some/model'.*cache .*: OSError: some/model is"):
        load_tokenizer("some/model")
