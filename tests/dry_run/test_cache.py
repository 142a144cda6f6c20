"""Dry runs kept on disk: found again, never mistaken for another, and never in the way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import tightfit.dry_run.cache
from tightfit.dry_run import dry_run
from tightfit.dry_run.cache import FOLDER_VARIABLE, cache_folder, entry_of, read_entry
from tightfit.facts.workload import Workload
from tightfit.policies import CheckpointingPolicy, OptimizerPolicy, Policies

CONFIG: dict[str, Any] = LlamaConfig(
    vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
).to_dict()
WORKLOAD = Workload(4, 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def entries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json"))


def test_a_dry_run_is_found_again(folder: Path) -> None:
    first = dry_run(CONFIG, Policies(), WORKLOAD)
    (entry,) = entries(folder)
    assert read_entry(entry) == first
    assert dry_run(CONFIG, Policies(), WORKLOAD) == first
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [entry.name]


def test_what_is_kept_needs_neither_torch_nor_transformers(folder: Path) -> None:
    first = dry_run(CONFIG, Policies(), WORKLOAD)
    program = f"""
import sys
from tightfit.dry_run import dry_run
from tightfit.facts.workload import Workload
from tightfit.policies import Policies
run = dry_run({CONFIG!r}, Policies(), Workload(4, 1))
assert run.trainable == {first.trainable}
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "other",
    [
        {"config": {**CONFIG, "vocab_size": 21}},
        {"policies": Policies(checkpointing=CheckpointingPolicy(True))},
        {"workload": Workload(5, 1)},
        {"card": (8, 0)},
        {"full_depth": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_job_has_another_entry(folder: Path, other: dict[str, Any]) -> None:
    job = {"config": CONFIG, "policies": Policies(), "workload": WORKLOAD}
    plain = entry_of(**job, card=None, full_depth=False)
    assert entry_of(**({**job, "card": None, "full_depth": False} | other)) != plain


def test_what_takes_no_memory_makes_no_difference(folder: Path) -> None:
    faster = Policies(optimizer=OptimizerPolicy(learning_rate=1.0))
    shorter = replace(WORKLOAD, average_sequence_length=2.0)
    assert entry_of(CONFIG, faster, shorter) == entry_of(CONFIG, Policies(), WORKLOAD)


@pytest.mark.parametrize("name", ["_version", "_own_code"])
def test_other_versions_have_other_entries(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entry_of(CONFIG, Policies(), WORKLOAD)
    monkeypatch.setattr(tightfit.dry_run.cache, name, lambda *args: "another")
    tightfit.dry_run.cache._versions.cache_clear()
    after = entry_of(CONFIG, Policies(), WORKLOAD)
    tightfit.dry_run.cache._versions.cache_clear()
    assert after != before


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"table": 3}', "\ud800"])
def test_a_broken_entry_is_made_again(folder: Path, content: str) -> None:
    first = dry_run(CONFIG, Policies(), WORKLOAD)
    (entry,) = entries(folder)
    entry.write_bytes(content.encode("utf-8", "surrogatepass"))
    assert read_entry(entry) is None
    assert dry_run(CONFIG, Policies(), WORKLOAD) == first
    assert read_entry(entry) == first


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(file))
    assert dry_run(CONFIG, Policies(), WORKLOAD).trainable > 0
    assert file.read_text() == ""


def test_the_folder_is_where_caches_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/tightfit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tightfit"
