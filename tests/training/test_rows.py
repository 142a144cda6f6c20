"""Rows are read as written; whatever is wrong with a file is a DataError that names the place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightfit.errors import DataError
from tightfit.training.rows import Row, read_rows

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def write(tmp_path: Path, content: bytes | str, name: str = "data.jsonl") -> Path:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_jsonl(tmp_path: Path) -> None:
    file = write(tmp_path, lines(CHAT, {"text": "plain", "id": 7}))
    first, second = read_rows(file)
    assert first == Row(str(file), 1, CHAT)
    assert (first.kind, second.kind) == ("messages", "text")
    assert second.where == f"{file}, row 2"


def test_json_list(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, json.dumps([CHAT, {"text": "t"}], indent=2), "data.json"))
    assert [(row.number, row.kind) for row in rows] == [(1, "messages"), (2, "text")]


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_byte_order_mark(tmp_path: Path, name: str) -> None:
    content = lines({"text": "ü"}) if name == "data.jsonl" else '[{"text": "ü"}]'
    [row] = read_rows(write(tmp_path, b"\xef\xbb\xbf" + content.encode(), name))
    assert row.value == {"text": "ü"}


def test_crlf_and_blank_lines_keep_line_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, '\r\n{"text": "a"}\r\n\r\n  \r\n{"text": "b"}')
    assert [(row.number, row.value["text"]) for row in read_rows(file)] == [(2, "a"), (5, "b")]


def test_line_separators_inside_strings_are_text(tmp_path: Path) -> None:
    [row] = read_rows(write(tmp_path, '{"text": "a\u2028b\u0085c"}\n'))
    assert row.value["text"] == "a\u2028b\u0085c"


def test_messages_win_over_a_rendered_copy(tmp_path: Path) -> None:
    [row] = read_rows(write(tmp_path, lines({**CHAT, "text": "rendered"})))
    assert row.kind == "messages"


GOOD = '{"text": "fine"}\n'
BROKEN: list[tuple[str, bytes, list[str]]] = [
    ("empty.jsonl", b"", ["no rows"]),
    ("blank.jsonl", b"\n \r\n", ["no rows"]),
    ("empty.json", b"", ["no rows"]),
    ("none.json", b"[]", ["no rows"]),
    ("data.csv", b"text\nx", [".csv", ".jsonl"]),
    ("cut.jsonl", (GOOD + '{"text": "x').encode(), ["row 2", "JSON", "column"]),
    ("deep.jsonl", b"[" * 100_000, ["row 1", "nested"]),
    ("digits.jsonl", b'{"n": ' + b"1" * 5000 + b"}", ["row 1", "JSON"]),
    ("string.jsonl", (GOOD + '\n"x"').encode(), ["row 3", "a string", "not an object"]),
    ("null.jsonl", b"null", ["row 1", "null", "not an object"]),
    ("list.jsonl", b'[{"text": "x"}]', ["row 1", "a list", ".json"]),
    ("object.json", b'{"text": "x"}', ["an object", ".jsonl"]),
    ("lines.json", (GOOD + GOOD).encode(), ["JSON", ".jsonl"]),
    ("mixed.json", b'[{"text": "x"}, 3]', ["row 2", "a number"]),
    ("cut.json", b'[\n{"text": "x"},\n{"te', ["JSON", "line 3"]),
    ("keys.jsonl", b'{"question": "x", "answer": "y"}', ["row 1", "answer, question", "messages"]),
    ("nokeys.jsonl", b"{}", ["row 1", "no keys"]),
    ("text.jsonl", b'{"text": 3}', ["row 1", "text is a number"]),
    ("text.jsonl", b'{"text": null}', ["row 1", "text is null"]),
    ("text.jsonl", b'{"text": true}', ["row 1", "text is a boolean"]),
    ("messages.jsonl", b'{"messages": "x"}', ["row 1", "messages is a string"]),
    ("messages.jsonl", b'{"messages": []}', ["row 1", "messages is empty"]),
    ("messages.jsonl", b'{"messages": [1]}', ["row 1", "messages[0] is a number"]),
    ("messages.jsonl", b'{"messages": [{"role": "user"}]}', ["messages[0] has no content"]),
    ("messages.jsonl", b'{"messages": [{"content": "x"}]}', ["messages[0] has no role"]),
    (
        "messages.jsonl",
        b'{"messages": [{"role": "user", "content": [1]}]}',
        ["messages[0].content is a list"],
    ),
    (
        "role.jsonl",
        b'{"messages": [{"role": "human", "content": "x"}]}',
        ["row 1", "'human'", "assistant"],
    ),
    ("latin.jsonl", GOOD.encode() + '{"text": "ü"}'.encode("latin-1"), ["row 2", "UTF-8", "0xfc"]),
    ("utf16.jsonl", GOOD.encode("utf-16"), ["UTF-16", "UTF-8"]),
    ("utf16le.jsonl", GOOD.encode("utf-16-le"), ["row 1", "NUL"]),
    ("utf32.json", "[]".encode("utf-32-le"), ["NUL"]),
    ("nul.jsonl", GOOD.encode() + b"\0\0", ["row 2", "NUL"]),
    ("half.jsonl", b'{"text": "\\ud800"}', ["row 1", "surrogate"]),
    ("half.jsonl", b'{"text": "x", "\\udfff": 1}', ["row 1", "surrogate"]),
]


@pytest.mark.parametrize(("name", "content", "parts"), BROKEN)
def test_broken_file(tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path, content, name))
    for part in [name, *parts]:
        assert part in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl' does not exist"):
        read_rows(tmp_path / "gone.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        read_rows(tmp_path / "folder.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows("nul\0.jsonl")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "text", "role", "content"]) | st.text(max_size=3),
            inner | st.sampled_from(["user", "assistant"]),
            max_size=3,
        )
    ),
    max_leaves=8,
)
contents = st.binary(max_size=60) | st.lists(
    json_values.map(json.dumps).map(str.encode) | st.binary(max_size=12), max_size=4
).map(b"\n".join)


@given(content=contents, suffix=st.sampled_from([".jsonl", ".json"]))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_give_rows_or_a_data_error(tmp_path: Path, content: bytes, suffix: str) -> None:
    file = write(tmp_path, content, f"any{suffix}")
    message, rows = "", list[Row]()
    try:
        rows = read_rows(file)
    except DataError as error:
        message = str(error)
    assert bool(rows) != (str(file) in message)
    for row in rows:
        assert isinstance(row.value.get("messages", row.value.get("text")), list | str)


def test_reading_rows_needs_no_torch() -> None:
    code = "import sys, tightfit.training.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
