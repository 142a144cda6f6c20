"""Reads data files into rows and says exactly which row is broken.

Knows file formats and the shapes a row may have. Does not know tokens: `chat.py` turns rows into
token ids. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.errors import DataError

RowKind = Literal["messages", "text"]
ROLES = ("system", "user", "assistant", "tool")

_KNOWN_KINDS = '{"messages": [{"role": ..., "content": ...}]} or {"text": ...}'
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Row:
    """One checked row of a data file.

    Attributes:
        file: the file as the user named it.
        number: its line in a .jsonl file, its place (from 1) in the list of a .json file.
        value: the object as written; `messages` or `text` has the right types.
    """

    file: str
    number: int
    value: dict[str, Any]

    @property
    def kind(self) -> RowKind:
        """`messages` wins where a row has both keys: its `text` is then a rendered copy."""
        return "messages" if "messages" in self.value else "text"

    @property
    def where(self) -> str:
        """`file, row number`, as error messages write it."""
        return _where(self.file, self.number)


def read_rows(file: str | Path) -> list[Row]:
    """All rows of a `.jsonl` file, or of a `.json` file that holds a list of objects.

    UTF-8, with or without a byte order mark; blank lines are skipped; lines end in LF or CRLF.

    Raises:
        DataError: the file cannot be read, is empty, or a row is broken or of an unknown kind.
    """
    path = Path(file)
    name = str(file)
    readers = {".jsonl": _json_lines, ".json": _json_list}
    if path.is_dir():
        raise DataError(f"{name} is a folder; name a .jsonl or .json file in it")
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{name!r}: unknown kind of data file {path.suffix!r}; known are .jsonl and .json"
        )
    rows = [_checked(name, number, value) for number, value in reader(name, _content(path, name))]
    if not rows:
        raise DataError(f"{name} holds no rows; put one JSON object on each line")
    return rows


def _content(path: Path, name: str) -> bytes:
    """The file without its byte order mark."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"data file {name!r} does not exist (looked in {path.absolute().parent})"
        ) from None
    except IsADirectoryError:
        raise DataError(f"{name!r} is a folder; name a .jsonl or .json file in it") from None
    except (OSError, ValueError) as error:
        raise DataError(f"data file {name!r} cannot be read: {error}") from error
    if content.startswith(_UTF16_BOMS):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
    return content.removeprefix(_BOM)


def _json_lines(name: str, content: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        text = _decoded(line, _where(name, number))
        if text.strip():
            yield number, _parsed(text, _where(name, number))


def _json_list(name: str, content: bytes) -> Iterator[tuple[int, Any]]:
    text = _decoded(content, name)
    if not text.strip():
        return
    try:
        values = _parsed(text, name)
    except DataError as error:
        if text.lstrip().startswith("["):
            raise
        raise DataError(f"{error}; if it holds one object a line, name it .jsonl") from None
    if not isinstance(values, list):
        raise DataError(
            f"{name} holds {_type_name(values)}, not a list of objects; "
            "a file of one object a line is named .jsonl"
        )
    yield from enumerate(values, start=1)


def _decoded(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise DataError(
            f"{where} holds NUL bytes: it is UTF-16, UTF-32 or no text at all; save it as UTF-8"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1}; "
            "save the file as UTF-8"
        ) from None


def _parsed(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # escapes can spell half a surrogate pair, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        if error.lineno == 1:
            place = f"column {error.colno}"
        raise DataError(f"{where} is not valid JSON: {error.msg} at {place}") from None
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a surrogate pair (\\ud8xx..\\udfxx)") from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None
    return value


def _checked(name: str, number: int, value: Any) -> Row:
    where = _where(name, number)
    if not isinstance(value, dict):
        hint = "; a file that is one list is named .json" if isinstance(value, list) else ""
        raise DataError(f"{where} holds {_type_name(value)}, not an object{hint}")
    if "messages" in value:
        _check_messages(value["messages"], where)
    elif "text" in value:
        if not isinstance(value["text"], str):
            raise DataError(f"{where}: text is {_type_name(value['text'])}, not a string")
    else:
        keys = ", ".join(sorted(value)) or "no keys"
        raise DataError(f"{where} is of no known kind: it has {keys}; known are {_KNOWN_KINDS}")
    return Row(name, number, value)


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        found = "empty" if messages == [] else _type_name(messages)
        raise DataError(f"{where}: messages is {found}, not a list of messages")
    for index, message in enumerate(messages):
        place = f"{where}: messages[{index}]"
        if not isinstance(message, dict):
            raise DataError(f"{place} is {_type_name(message)}, not an object")
        for key in ("role", "content"):
            if key not in message:
                raise DataError(f"{place} has no {key}")
            if not isinstance(message[key], str):
                raise DataError(f"{place}.{key} is {_type_name(message[key])}, not a string")
        if message["role"] not in ROLES:
            raise DataError(
                f"{place}: unknown role {message['role']!r}; known are {', '.join(ROLES)}"
            )


def _where(name: str, number: int) -> str:
    return f"{name}, row {number}"


def _type_name(value: Any) -> str:
    """The JSON word for a parsed value's type."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")
