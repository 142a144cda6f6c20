"""Files of keys: lines, repeated keys, and text that is no file of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.errors import ConfigError
from tightfit.interop.documents import document_of, read_document

JSON = '{\n  "a": 1,\n  "b": {"c": [{"d": 2}],\n "e": "x: {y}"},\n\t"f": 3\n}'
YAML = "a: 1\nb:\n  c: [1]\n  e: 'x'\n# remark\nf: 3\n"
TOML = "a = 1\n[b]\nc = [1]\ne = 'x'\n\n[b.g]\nf = 3\n"


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [(JSON, "a.json", 4), (YAML, "a.yaml", 4), (TOML, "a.toml", 4), (JSON, "unknown", 4)],
)
def test_every_key_has_a_line(text: str, name: str, line: int) -> None:
    document = document_of(text, name)
    assert document.content["a"] == 1
    assert document.where("b", "e") == f"{name}, line {line}: b.e"
    assert document.where("nowhere") == f"{name}: nowhere"


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_document(path).content == {"a": 1}


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ('{"a": 1, "a": 2}', "a.json", "the key 'a' is there twice; keep one"),
        ("a: 1\na: 2", "a.yaml", "a.yaml, line 2: the key 'a' is there twice"),
        ('{"a": }', "a.json", "a.json, line 1: Expecting value"),
        ("a: [1", "a.yaml", "a.yaml, line"),
        ("a = ", "a.toml", "a.toml: Invalid value"),
        ("[1, 2]", "a.json", "a.json holds a list; it must hold keys with values"),
        ("", "a.yaml", "a.yaml is empty"),
        ("a: &x [*x]", "a.yaml", "blocks are nested more than 64 deep"),
        ("[" * 99999, "a.json", "cannot be read"),
        ('{"a": ' + "1" * 5000 + "}", "a.json", "cannot be read"),
        ("a: !!int ''", "a.yaml", "a value that YAML cannot hold"),
        ("a: !!bool perhaps", "a.yaml", "a value that YAML cannot hold"),
        ("a: 2001-99-99", "a.yaml", "a value that YAML cannot hold"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        document_of(text, name)
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_document(path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(tmp_path / "latin.yaml")


@given(
    st.text(max_size=60) | st.text("{}[]:,\"' \n-&*!#|>?%@=ab1.~", max_size=40),
    st.sampled_from(["a.json", "a.yaml", "a.toml", "a"]),
)
def test_any_text_is_keys_or_a_message(text: str, name: str) -> None:
    message, keys = name, list[str]()
    try:
        keys = list(document_of(text, name).content)
    except ConfigError as error:
        message = str(error)
    assert message.startswith(name)
    assert all(key.isprintable() for key in keys)
