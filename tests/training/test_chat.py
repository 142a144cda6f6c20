"""Exactly the assistant's words and its end-of-turn tokens are trained, or the row is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tightfit.errors import DataError
from tightfit.facts.labels import IGNORED
from tightfit.training.chat import RowEncoder
from tightfit.training.rows import Row

EOT = "<|im_end|>"
CHATML_TURN = "'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ " + CHATML_TURN + " }}{% endfor %}" + PROMPT
)
MISTRAL = (
    "{{ '<|im_start|>' }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% endif %}{% endfor %}"
)
CLOSING_TOKEN = (
    "{% for m in messages %}{{ " + CHATML_TURN + " }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STRIPS_EARLIER_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('.')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
ONLY_LAST_QUESTION = (
    "{{ '<|im_start|>' + messages[-1]['role'] + '\n' + messages[-1]['content'] + '<|im_end|>\n' }}"
    + PROMPT
)
OTHER_HEADER = (
    "{% for m in messages %}{{ " + CHATML_TURN + " }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
NO_PROMPT = "{% for m in messages %}{{ " + CHATML_TURN + " }}{% endfor %}"
PLAIN_NO_PROMPT = "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
PLAIN_STRIPS = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:6] }}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}{{ " + CHATML_TURN + " }}{% endfor %}"
) + PROMPT


def chat(*turns: str) -> Row:
    """A row of `role: content` turns."""
    pairs = [turn.split(": ", 1) for turn in turns]
    messages = [{"role": role, "content": content} for role, content in pairs]
    return Row("data.jsonl", 3, {"messages": messages})


def runs(tokenizer: PreTrainedTokenizerFast, ids: list[int], labels: list[int]) -> list[str]:
    """The text of each unbroken run of trained tokens."""
    texts: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        assert label in (IGNORED, token)
        if label == IGNORED:
            texts.append([])
        else:
            texts[-1].append(token)
    return [tokenizer.decode(part) for part in texts if part]


def trained(tokenizer: PreTrainedTokenizerFast, row: Row) -> list[str]:
    ids, labels = RowEncoder(tokenizer).encode(row)
    return runs(tokenizer, ids, labels)


CASES: list[tuple[Row, list[str]]] = [
    (chat("user: hi", "assistant: yo"), [f"yo{EOT}"]),
    (chat("system: Be kind.", "user: hi", "assistant: yo"), [f"yo{EOT}"]),
    (chat("system: Be kind.", "assistant: hello"), [f"hello{EOT}"]),
    (
        chat("user: a", "assistant: one two", "user: b", "assistant: three"),
        [f"one two{EOT}", f"three{EOT}"],
    ),
    (chat("user: a", "assistant: first", "assistant: second"), [f"first{EOT}", f"second{EOT}"]),
    (chat("user: a", "assistant: x", "user: left open"), [f"x{EOT}"]),
    (chat("user: a", "assistant: "), [EOT]),
    (chat("user: ", "assistant: ", "user: b", "assistant: x"), [EOT, f"x{EOT}"]),
    (chat("user: same", "assistant: same", "tool: same", "assistant: same"), [f"same{EOT}"] * 2),
    (chat("user: assistant\nyo", "assistant: ends in newline\n"), [f"ends in newline\n{EOT}"]),
    (chat("user: smile", "assistant: 🙂 ü"), [f"🙂 ü{EOT}"]),
]


@pytest.mark.parametrize("template", ["chatml", "default system", "closing token"])
@pytest.mark.parametrize(("row", "expected"), CASES)
def test_exactly_the_assistants_words(
    fresh_tokenizer: PreTrainedTokenizerFast, template: str, row: Row, expected: list[str]
) -> None:
    templates = {"default system": DEFAULT_SYSTEM, "closing token": CLOSING_TOKEN}
    fresh_tokenizer.chat_template = templates.get(template, fresh_tokenizer.chat_template)
    assert fresh_tokenizer.pad_token == fresh_tokenizer.eos_token == EOT
    assert trained(fresh_tokenizer, row) == expected


def test_input_ids_are_the_templates_own(tokenizer: PreTrainedTokenizerFast) -> None:
    row = chat("user: hi", "assistant: yo")
    ids, labels = RowEncoder(tokenizer).encode(row)
    rendered: Any = tokenizer.apply_chat_template(row.value["messages"])
    assert ids == list(rendered["input_ids"])
    assert len(ids) == len(labels)
    assert labels[-1] == IGNORED  # the newline after the end-of-turn token


def test_default_system_prompt_is_read_but_not_trained(
    fresh_tokenizer: PreTrainedTokenizerFast,
) -> None:
    fresh_tokenizer.chat_template = DEFAULT_SYSTEM
    ids, labels = RowEncoder(fresh_tokenizer).encode(chat("user: hi", "assistant: yo"))
    assert "Be helpful." in fresh_tokenizer.decode(ids)
    assert runs(fresh_tokenizer, ids, labels) == [f"yo{EOT}"]


def test_template_without_generation_header(fresh_tokenizer: PreTrainedTokenizerFast) -> None:
    fresh_tokenizer.chat_template = MISTRAL
    row = chat("user: a", "assistant: one", "user: b", "assistant: two")
    ids, labels = RowEncoder(fresh_tokenizer).encode(row)
    assert runs(fresh_tokenizer, ids, labels) == [f" one{EOT}", f" two{EOT}"]
    assert ids.count(fresh_tokenizer.bos_token_id) == 1


def test_template_that_ends_turns_with_plain_text(
    fresh_tokenizer: PreTrainedTokenizerFast,
) -> None:
    fresh_tokenizer.chat_template = PLAIN
    encoder = RowEncoder(fresh_tokenizer)
    assert encoder.end_of_turn is None
    ids, labels = encoder.encode(chat("user: a", "assistant: one", "user: b", "assistant: two"))
    first, last = (text.strip() for text in runs(fresh_tokenizer, ids, labels))
    assert (first, last) == ("one", "two")


def test_a_token_shared_with_the_header_is_trained(
    fresh_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Words that start with a newline merge with the newline that ends the header."""
    assert len(fresh_tokenizer("\n\n")["input_ids"]) == 1, "the token must exist"
    assert trained(fresh_tokenizer, chat("user: a", "assistant: \n")) == [f"\n\n{EOT}"]


REFUSED: list[tuple[str, Row, str]] = [
    (
        STRIPS_EARLIER_TURNS,
        chat("user: a", "assistant: think. say", "user: b", "assistant: c"),
        "strips or rewrites",
    ),
    (
        ONLY_LAST_QUESTION,
        chat("user: a", "assistant: b", "user: c", "assistant: d"),
        "strips or rewrites",
    ),
    (
        PLAIN_STRIPS,
        chat("user: a", "assistant: words cut", "user: b", "assistant: c"),
        "strips or rewrites",
    ),
    (OTHER_HEADER, chat("user: a", "assistant: b"), "generation prompt"),
    (NO_SYSTEM, chat("system: s", "user: a", "assistant: b"), "no system role"),
    ("{% for m in messages %}", chat("user: a", "assistant: b"), "refuses"),
    ("{{ messages[0]['x']['y'] }}", chat("user: a", "assistant: b"), "refuses"),
]


@pytest.mark.parametrize(("template", "row", "part"), REFUSED)
def test_templates_that_cannot_be_marked(
    fresh_tokenizer: PreTrainedTokenizerFast, template: str, row: Row, part: str
) -> None:
    fresh_tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"data\.jsonl, row 3.*") as caught:
        RowEncoder(fresh_tokenizer).encode(row)
    assert part in str(caught.value)


@pytest.mark.parametrize("template", [NO_PROMPT, PLAIN_NO_PROMPT])
def test_template_that_ignores_the_generation_prompt(
    fresh_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    fresh_tokenizer.chat_template = template
    with pytest.raises(DataError, match="ignores add_generation_prompt"):
        RowEncoder(fresh_tokenizer).encode(chat("user: a", "assistant: b"))


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (chat("user: a"), "no assistant turn"),
        (chat("assistant: a", "user: b"), "first message"),
        (chat("user: a", f"assistant: b{EOT}c"), "2 end-of-turn tokens"),
        (Row("data.jsonl", 3, {"text": ""}), "nothing to train"),
    ],
)
def test_rows_with_nothing_to_train(
    tokenizer: PreTrainedTokenizerFast, row: Row, part: str
) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl, row 3") as caught:
        RowEncoder(tokenizer).encode(row)
    assert part in str(caught.value)


def test_no_chat_template(fresh_tokenizer: PreTrainedTokenizerFast) -> None:
    fresh_tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template; use an instruct model"):
        RowEncoder(fresh_tokenizer).encode(chat("user: a", "assistant: b"))
    ids, _ = RowEncoder(fresh_tokenizer).encode(Row("data.jsonl", 1, {"text": "still fine"}))
    assert ids


def test_text_is_trained_whole_and_ends_once(fresh_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = RowEncoder(fresh_tokenizer)
    for text in ("Some text.", f"Some text.{EOT}"):
        ids, labels = encoder.encode(Row("data.jsonl", 1, {"text": text}))
        assert labels == ids
        assert fresh_tokenizer.decode(ids) == f"Some text.{EOT}"


def test_text_has_one_bos(fresh_tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    fresh_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    for text in ("x", "<|im_start|>x"):
        ids, _ = RowEncoder(fresh_tokenizer).encode(Row("data.jsonl", 1, {"text": text}))
        assert fresh_tokenizer.decode(ids) == f"<|im_start|>x{EOT}"
    chat_ids, _ = RowEncoder(fresh_tokenizer).encode(chat("user: hi", "assistant: yo"))
    assert chat_ids[:2] != [1, 1]
    assert chat_ids.count(1) == 2  # one for each turn


def test_text_needs_an_end(fresh_tokenizer: PreTrainedTokenizerFast) -> None:
    fresh_tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos token"):
        RowEncoder(fresh_tokenizer).encode(Row("data.jsonl", 1, {"text": "x"}))
