"""Writes the demo's data: questions and answers out of the Python language reference.

The text is the standard library's `pydoc_data.topics`, so nothing is downloaded. Every row is a
short conversation; with one version of Python the file is always the same. Knows no tokenizer:
lengths are limited in characters.

    python examples/make_demo_data.py [OUTPUT]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

OUTPUT = Path(__file__).parent / ".cache" / "demo.jsonl"
SHORTEST, LONGEST = 110, 520  # characters of an answer: about 25 to 150 tokens

_SECTION_FORMS = (
    "What does the Python language reference say about {}?",
    "Explain {} in Python.",
    "How does Python define {}?",
    "Tell me about {} in Python.",
    "In Python, what should I know about {}?",
    "Describe {} as the Python language reference does.",
)
_DETAIL_FORMS = (
    "In the section on {}, what does the Python reference say about {}?",
    "For {} in Python, how is {} explained?",
    "What is the connection between {} and {} in Python?",
)
_MORE_FORMS = (
    "What else does the Python language reference say about {}?",
    "Tell me more about {} in Python.",
    "What are further details of {} in Python?",
)
_CALL_FORMS = (
    "What does {} do?",
    "When is {} used in Python?",
    "Explain {} in Python.",
    "What should I know about calling {}?",
)
_NAME_FORMS = ("What is {} in Python?", "Explain {} in Python.", "What does {} hold?")
_VAGUE_HEADINGS = {"Overview", "Format examples", "Names", "Methods"}

_UNDERLINE = re.compile(r"([*=\-])\1{2,}")
_ENTRY = re.compile(r"(?:class )?(\w+(?:\.\w+)+)(\(.*\))?")
_NOT_PROSE = re.compile(
    r"\s|[*+|>\[(]|\d+\.|Changed in|New in|Added in|Deprecated|Removed in|Note|See also|Warning"
    r"|Example|\.\. |-"
)
_TERM = re.compile(r'"[A-Za-z_][\w.]{2,}(?:\(\))?"')


@dataclass(frozen=True)
class Passage:
    """A piece of the reference.

    Attributes:
        subject: what it is about: a heading, or the name of a method or attribute.
        kind: `section`, `call` or `name`.
        paragraphs: clean prose.
    """

    subject: str
    kind: str
    paragraphs: tuple[str, ...]


def main(output: Path = OUTPUT) -> None:
    """Writes the rows to `output`, whole or not at all."""
    rows = demo_rows()
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.replace(output)
    print(f"{output}: {len(rows)} questions about Python with their answers")


def demo_rows() -> list[dict[str, list[dict[str, str]]]]:
    """All question/answer pairs as `messages` rows."""
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in _pairs(_passages())
    ]


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sys.exit(
            "This Python comes without the module pydoc_data.topics, whose text the demo uses. "
            "Install the full standard library (Debian: libpython3-stdlib), or use a Python "
            "from python.org."
        )
    return dict(topics)


def _passages() -> Iterator[Passage]:
    """Every section and entry once, although topics repeat parts of each other."""
    seen: set[str] = set()
    for _, text in sorted(_topics().items()):
        for heading, blocks in _sections(text):
            for passage in _section_passages(heading, blocks):
                new = tuple(part for part in passage.paragraphs if part not in seen)
                seen.update(new)
                if new:
                    yield Passage(passage.subject, passage.kind, new)


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Headings with the blocks (paragraphs, as written) that stand below each."""
    heading, blocks = "", list[str]()
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        if len(lines) == 2 and _UNDERLINE.fullmatch(lines[1]):
            yield heading, blocks
            heading, blocks = lines[0], []
        else:
            blocks.append("\n".join(lines))
    yield heading, blocks


def _section_passages(heading: str, blocks: Iterable[str]) -> Iterator[Passage]:
    """The section's own prose, then each method or attribute it describes."""
    prose, entry, entry_prose = list[str](), None, list[str]()
    entries: list[Passage] = []
    for block in blocks:
        match = _ENTRY.fullmatch(block.split("\n")[0])
        if match:
            entry, entry_prose = match, []
            entries.append(_entry(match, ()))
        elif block.startswith("   ") and entry is not None:
            entry_prose += _prose([re.sub("(?m)^   ", "", block)])
            entries[-1] = _entry(entry, tuple(entry_prose))
        else:
            entry = None
            prose += _prose([block])
    if heading and heading not in _VAGUE_HEADINGS:
        yield Passage(_subject(heading), "section", tuple(prose))
    yield from entries


def _entry(match: re.Match[str], paragraphs: tuple[str, ...]) -> Passage:
    return Passage(f'"{match[1]}"', "call" if match[2] else "name", paragraphs)


def _subject(heading: str) -> str:
    """A heading as it reads inside a sentence: `The "if" statement` -> `the "if" statement`."""
    words = re.sub(r"\*(\w+)\*", r'"\1"', heading).split(" — ")[0]
    if re.fullmatch(r"__\w+__|None|NotImplemented|Ellipsis", words):
        return f'"{words}"'
    if words.startswith('"') and words.endswith((" clause", " statement")):
        return f"the {words}"
    return re.sub(r'(?<![\w".])(?!Python|Boolean)[A-Z][a-z]+', lambda word: word[0].lower(), words)


def _prose(blocks: Iterable[str]) -> list[str]:
    """The blocks that are whole sentences, cleaned; grammar, lists, code and notes are left out."""
    return [
        _clean(block)
        for block in blocks
        if not _NOT_PROSE.match(block) and "\n   " not in block and block.endswith(".")
    ]


def _clean(block: str) -> str:
    text = re.sub(r"(?<=\w)-\n(?=\w)", "-", block)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" ?\[\d+\]", "", text)
    text = re.sub(r"(?<![\w\"*'])\*(\w(?:[^*\"]*\w)?)\*(?![\w*])", r"\1", text)
    return re.sub(r'""([^"]+)""', r'"\1"', text).strip()


def _pairs(passages: Iterable[Passage]) -> Iterator[tuple[str, str]]:
    """Questions with their answers; no question comes twice."""
    forms = {"section": _SECTION_FORMS, "call": _CALL_FORMS, "name": _NAME_FORMS}
    first = {kind: cycle(texts) for kind, texts in forms.items()}
    details, more = cycle(_DETAIL_FORMS), cycle(_MORE_FORMS)
    asked: set[str] = set()
    for passage in passages:
        named = passage.subject
        for index, answer in enumerate(_answers(passage.paragraphs)):
            term = _new_term(answer, named)
            if index == 0:
                question = next(first[passage.kind]).format(passage.subject)
            elif term is None:
                question = next(more).format(passage.subject)
            else:
                question = next(details).format(passage.subject, term)
                named += term
            if question not in asked:
                asked.add(question)
                yield question, answer


def _new_term(answer: str, named: str) -> str | None:
    """The first quoted name in `answer` that `named` does not hold already."""
    terms = (match[0] for match in _TERM.finditer(answer))
    return next((term for term in terms if term.strip('"()') not in named), None)


def _answers(paragraphs: Iterable[str]) -> Iterator[str]:
    """Neighbouring paragraphs joined while they stay short; long ones end after a sentence."""
    answer = ""
    for paragraph in paragraphs:
        joined = f"{answer}\n\n{paragraph}" if answer else paragraph
        if len(joined) <= LONGEST:
            answer = joined
            continue
        if len(answer) >= SHORTEST:
            yield answer
        answer = _first_sentences(paragraph)
    if len(answer) >= SHORTEST:
        yield answer


def _first_sentences(paragraph: str) -> str:
    if len(paragraph) <= LONGEST:
        return paragraph
    end = paragraph.rfind(". ", 0, LONGEST)
    while end > 0 and paragraph.count("(", 0, end) > paragraph.count(")", 0, end):
        end = paragraph.rfind(". ", 0, end)
    return paragraph[: end + 1]


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
