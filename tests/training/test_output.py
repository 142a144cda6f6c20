"""The folder of a run: what may be written where, decided before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightfit.errors import ConfigError
from tightfit.facts import disk
from tightfit.facts.job import Job
from tightfit.training.output import check_output_dir, open_output_dir


def job(folder: Path | None, **keys: Any) -> Job:
    return Job(model_name_or_path="m", output_dir=None if folder is None else str(folder), **keys)


def test_a_new_folder_is_made_only_when_opened(tmp_path: Path) -> None:
    made = job(tmp_path / "a" / "b")
    assert check_output_dir(made) == (tmp_path / "a" / "b", None)
    assert not (tmp_path / "a").exists()
    open_output_dir(made, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_other_peoples_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "checkpoint-best").mkdir()
    assert check_output_dir(job(tmp_path)) == (tmp_path, None)


@pytest.mark.parametrize(
    "name",
    ["trainer_log.jsonl", "plan.yaml", "report.json", "checkpoint-3", ".checkpoint-3.incomplete"],
)
def test_traces_of_a_run_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if "checkpoint" in name else (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="already holds a run") as raised:
        check_output_dir(job(tmp_path))
    assert name in str(raised.value)
    allowed = job(tmp_path, overwrite_output_dir=True)
    check_output_dir(allowed)
    assert (tmp_path / name).exists()
    open_output_dir(allowed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_checkpoint_elsewhere_is_only_unlinked(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoint-1").symlink_to(elsewhere)
    open_output_dir(job(folder, overwrite_output_dir=True), folder)
    assert list(folder.iterdir()) == []
    assert (elsewhere / "model.safetensors").exists()


def test_no_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="output_dir is missing"):
        check_output_dir(job(None))


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} may not be written to"):
        check_output_dir(job(tmp_path / "run"))


def test_an_offload_folder_that_is_none(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    made = job(tmp_path / "run", offload_optimizer="nvme", offload_folder=str(taken))
    with pytest.raises(ConfigError, match=r"offload_folder .*taken is a file, not a folder"):
        check_output_dir(made)


def test_an_offload_folder_that_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "why_no_disk", lambda folder: "it is a drawing of a disk")
    with pytest.raises(ConfigError, match=r"^offload_folder .*a drawing.* give an offload_folder"):
        check_output_dir(job(tmp_path / "run", offload_param="nvme"))
    check_output_dir(job(tmp_path / "run"))


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keys: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"cannot be used.*Permission denied"):
        open_output_dir(job(tmp_path / "run"), tmp_path / "run")


def test_resume_takes_the_last_checkpoint(tmp_path: Path) -> None:
    for number in (2, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
    found = check_output_dir(job(tmp_path, resume=True))
    assert found == (tmp_path, tmp_path / "checkpoint-10")
    with pytest.raises(ConfigError, match="contradict"):
        check_output_dir(job(tmp_path, resume=True, overwrite_output_dir=True))
