"""The preview shows what is trained, with colour and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from tightfit.training.chat import RowEncoder
from tightfit.training.preview import SamplePreview
from tightfit.training.rows import Row
from tightfit.training.samples import Sample


def make_sample(tokenizer: PreTrainedTokenizerFast, answer: str = "yo [b]x") -> Sample:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    ids, labels = RowEncoder(tokenizer).encode(Row("d.jsonl", 4, {"messages": messages}))
    return Sample(tuple(ids), tuple(labels), "d.jsonl", 4)


def shown(
    sample: Sample,
    tokenizer: PreTrainedTokenizerFast,
    encoding: str = "utf-8",
    colour: bool = False,
) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=stream,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        width=70,
        no_color=False,
        legacy_windows=False,
    )
    console.print(SamplePreview([sample], tokenizer))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def test_brackets_without_colour(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = make_sample(tokenizer)
    text = shown(sample, tokenizer)
    assert "⟦yo [b]x<|im_end|>⟧" in text
    assert text.count("⟦") == 2  # the title explains them
    assert "<|im_start|>user\nhi<|im_end|>\n" in text
    title = f"d.jsonl, row 4: {sample.trained_tokens} of {len(sample.input_ids)} tokens are trained"
    assert title in text
    assert "\x1b" not in text


def test_ascii_output_gets_ascii_brackets(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "[[yo [b]x<|im_end|>]]" in shown(make_sample(tokenizer), tokenizer, encoding="ascii")


def test_colour_on_a_terminal(tokenizer: PreTrainedTokenizerFast) -> None:
    text = shown(make_sample(tokenizer), tokenizer, colour=True)
    assert "⟦" not in text
    assert "\x1b[1;30;42myo [b]x<|im_end|>\x1b[0m" in text


def test_no_color_is_respected(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=70).print(
        SamplePreview([make_sample(tokenizer)], tokenizer)
    )
    assert "⟦yo" in stream.getvalue()


def test_control_characters_do_not_reach_the_terminal(tokenizer: PreTrainedTokenizerFast) -> None:
    text = shown(make_sample(tokenizer, answer="a\x1b[2Jb\x07"), tokenizer)
    assert "⟦a␛[2Jb␇<|im_end|>⟧" in text


def test_first_token_of_a_text_is_never_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tuple(tokenizer("xyz")["input_ids"])
    sample = Sample(ids, ids, "d.jsonl", 1)
    first = tokenizer.decode(ids[:1])
    assert f"{first}⟦{tokenizer.decode(ids[1:])}⟧" in shown(sample, tokenizer)
