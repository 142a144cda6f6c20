"""The demo's rows are valid, short, different from each other and always the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tightfit.training.rows import read_rows

SCRIPT = Path(__file__).parents[2] / "examples" / "make_demo_data.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_rows(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(tmp_path / "new" / "demo.jsonl")
    rows = read_rows(tmp_path / "new" / "demo.jsonl")
    assert 300 <= len(rows) <= 800
    assert f"{len(rows)} questions" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["demo.jsonl"]
    roles = [[message["role"] for message in row.value["messages"]] for row in rows]
    assert all(turns == ["user", "assistant"] for turns in roles)


def test_questions_differ_and_answers_are_clean(script: ModuleType) -> None:
    pairs = [[message["content"] for message in row["messages"]] for row in script.demo_rows()]
    questions, answers = zip(*pairs, strict=True)
    assert len(set(questions)) == len(questions)
    assert len(set(answers)) == len(answers)
    assert len({question.split('"')[0].split()[0] for question in questions}) >= 6
    for question, answer in pairs:
        assert question.endswith(("?", "."))
        assert len(question) < 140
        assert script.SHORTEST <= len(answer) <= script.LONGEST
        assert answer.endswith(".")
        assert not any(mark in answer for mark in ("::=", "===", ">>>", "\n   ", "  "))


def test_always_the_same(script: ModuleType) -> None:
    assert script.demo_rows() == script.demo_rows()


def test_headings_read_inside_a_sentence(script: ModuleType) -> None:
    headings = {
        'The "if" statement': 'the "if" statement',
        "Comparisons": "comparisons",
        '"except*" clause': 'the "except*" clause',
        "__slots__": '"__slots__"',
        '"pdb" — The Python Debugger': '"pdb"',
        '"numbers.Real" ("float")': '"numbers.Real" ("float")',
        "I/O objects (also known as file objects)": "I/O objects (also known as file objects)",
        "Boolean operations": "Boolean operations",
    }
    assert {heading: script._subject(heading) for heading in headings} == headings


def test_without_pydoc_data(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(SystemExit, match=r"comes without the module pydoc_data\.topics"):
        script.demo_rows()
