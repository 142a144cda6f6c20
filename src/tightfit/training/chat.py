"""Turns a row into token ids and labels, with loss only on the assistant's words.

The mask comes from the token ids that the tokenizer's own chat template produces for growing
parts of the conversation; no text is ever searched for. Does not know files or batches.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from tightfit.errors import DataError
from tightfit.facts.labels import IGNORED
from tightfit.training.rows import Row

_PROBE_WORDS = ("x", "0")  # two answers that differ from their first token on


class RowEncoder:
    """Encodes rows with one tokenizer.

    What is trained of an assistant's turn is what a model generates when it answers: the words
    and the end-of-turn token, at which generation stops. What a template writes after that
    token, such as ChatML's newline, is never generated and not trained.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode(self, row: Row) -> tuple[list[int], list[int]]:
        """`(input_ids, labels)` of a row, of equal length; label i belongs to token i.

        Raises:
            DataError: nothing in the row would be trained, or the template does not let the
                assistant's words be told from the rest.
        """
        ids, labels = self._messages(row) if row.kind == "messages" else self._text(row)
        if all(label == IGNORED for label in labels[1:]):
            raise DataError(f"{row.where}: nothing to train, all labels are masked")
        return ids, labels

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token at which an answer ends: the first control token the template writes after it.

        None when the template ends a turn with plain text only; all of that text is then trained.
        """
        question = [{"role": "user", "content": "x"}]
        where = "a question with an answer"
        prompt = self._render(question, where, add_generation_prompt=True)
        answers = [
            self._render([*question, {"role": "assistant", "content": words}], where)
            for words in _PROBE_WORDS
        ]
        start = _common_prefix(*answers)
        plain = self._render(question, where)
        header = self.tokenizer.decode(answers[0][len(prompt) : start])
        if prompt == plain and str(header).strip():
            raise DataError(
                "the chat template ignores add_generation_prompt, so the header before the "
                "assistant's words cannot be told from the words; use a tokenizer whose template "
                "writes it"
            )
        after = answers[0][start:]
        return next((token for token in after if token in self._control_tokens), None)

    @cached_property
    def _control_tokens(self) -> frozenset[int]:
        """Tokens that ordinary text is never merged into."""
        tokenizer = self.tokenizer
        return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)

    def _text(self, row: Row) -> tuple[list[int], list[int]]:
        """All tokens are trained, and the end-of-text token once."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(f"{row.where}: the tokenizer has no eos token to end a text with")
        ids = list(self.tokenizer(row.value["text"], verbose=False)["input_ids"])
        if bos is not None and bos != eos and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if not ids or ids[-1] != eos:
            ids.append(eos)
        return ids, list(ids)

    def _messages(self, row: Row) -> tuple[list[int], list[int]]:
        messages = row.value["messages"]
        self._check_conversation(row)
        ids = self._render(messages, row.where)
        labels = [IGNORED] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._turn(row, index, ids)
                labels[start:end] = ids[start:end]
        return ids, labels

    def _check_conversation(self, row: Row) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{row.where} holds messages, but the tokenizer has no chat template; use an "
                "instruct model, put a chat_template.jinja beside its tokenizer, or give rows "
                'of {"text": ...}'
            )
        roles = [message["role"] for message in row.value["messages"]]
        if "assistant" not in roles:
            raise DataError(f"{row.where} has no assistant turn, so nothing to train")
        if roles[0] == "assistant":
            raise DataError(
                f"{row.where}: the first message is the assistant's; "
                "put a user or system message before it"
            )

    def _turn(self, row: Row, index: int, ids: list[int]) -> tuple[int, int]:
        """Where the trained tokens of assistant message `index` start and end in `ids`."""
        messages = row.value["messages"]
        start = self._turn_start(row, index, ids)
        through = ids
        if index + 1 < len(messages):
            through = self._render(messages[: index + 1], row.where)
        if self.end_of_turn is None:
            end = _common_prefix(through, ids)
            if end < len(through) and not self._is_beginning(row, messages[: index + 1], False):
                raise _rewritten(row, index)
        else:
            end = self._after_end_of_turn(row, index, through, start)
            if ids[:end] != through[:end]:
                raise _rewritten(row, index)
        return start, end

    def _after_end_of_turn(self, row: Row, index: int, through: list[int], start: int) -> int:
        """The place after the one end-of-turn token in `through[start:]`."""
        assert self.end_of_turn is not None
        count = through[start:].count(self.end_of_turn)
        if count != 1:
            name = self.tokenizer.convert_ids_to_tokens(self.end_of_turn)
            raise DataError(
                f"{row.where}: messages[{index}] would be written with {count} end-of-turn tokens "
                f"{name}, not one; remove the token from the message, or use a template that "
                "writes it once"
            )
        return through.index(self.end_of_turn, start) + 1

    def _turn_start(self, row: Row, index: int, ids: list[int]) -> int:
        """The end of the prompt that a model would be given to write message `index`.

        Words that start with a space or newline, or follow a header that ends with one, may share
        a token with the end of the prompt. Such a token holds words, so it is trained.
        """
        before = row.value["messages"][:index]
        prompt = self._render(before, row.where, add_generation_prompt=True)
        common = _common_prefix(prompt, ids)
        if common < len(prompt) - 1 or (
            common == len(prompt) - 1 and not self._is_beginning(row, before, True)
        ):
            raise _rewritten(row, index)
        return common

    def _is_beginning(
        self, row: Row, messages: list[dict[str, Any]], add_generation_prompt: bool
    ) -> bool:
        """Whether the text of the first messages begins the text of the whole row.

        Then their tokens differ only because a token was merged across the border.
        """
        template = self.tokenizer.apply_chat_template
        part = template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return str(template(row.value["messages"], tokenize=False)).startswith(str(part))

    def _render(
        self, messages: list[dict[str, Any]], where: str, add_generation_prompt: bool = False
    ) -> list[int]:
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=add_generation_prompt,
                tokenizer_kwargs={"verbose": False},
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{where}: the chat template refuses the messages: {error}") from error
        return list(encoded["input_ids"])


def _common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two sequences share from the start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rewritten(row: Row, index: int) -> DataError:
    return DataError(
        f"{row.where}: messages[{index}]: the chat template writes this turn differently when the "
        "conversation goes on, or differently from its generation prompt (it strips or rewrites "
        "turns), so the assistant's words cannot be told from the rest; end the row after its "
        "first assistant turn, or use a template that only appends"
    )
