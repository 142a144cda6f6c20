"""A checkpoint is there whole or not at all, whatever fails while it is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tightfit.engine.regions import whole
from tightfit.errors import ConfigError, TrainingError
from tightfit.facts.job import Job
from tightfit.training import checkpoint as checkpoints
from tightfit.training import saved_states
from tightfit.training.checkpoint import Progress, prune_checkpoints, read_progress
from tightfit.training.checkpoint_folders import latest_checkpoint
from tightfit.training.run import prepare
from tightfit.training.tensor_file import Part

MakeJob = Callable[..., Job]
RunJob = Callable[..., Any]

PROGRESS = Progress(
    step=3, epoch=1, steps_in_epoch=2, global_batch_size=2, train_samples=5, seed=42
)


def fail_in(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A full disk, in one of the places where a save writes."""

    def full(*arguments: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    if place == "config":
        from transformers import PretrainedConfig

        monkeypatch.setattr(PretrainedConfig, "save_pretrained", full)
    elif place == "room":
        monkeypatch.setattr(os, "posix_fallocate", full)
    elif place == "model":
        monkeypatch.setattr(os, "pwrite", full)
    elif place == "tokenizer":
        from transformers import PreTrainedTokenizerBase

        monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    elif place == "optimizer":
        monkeypatch.setattr(checkpoints, "state_parts", full)
    elif place == "state":
        monkeypatch.setattr(checkpoints, "asdict", full)
    elif place == "flush":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "rename", full)


@pytest.mark.parametrize(
    "place", ["config", "room", "model", "tokenizer", "optimizer", "state", "flush", "rename"]
)
def test_a_save_that_fails_leaves_the_checkpoint_before(
    run_job: RunJob, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_job(max_steps=4)
    with monkeypatch.context() as patch:
        fail_in(patch, place)
        with pytest.raises(TrainingError, match=r"checkpoint-6 .*No space.*checkpoint-4 is the"):
            run_job(max_steps=6, resume=True)
    left = {path.name for path in first.prepared.output_dir.iterdir()}
    assert left == {"checkpoint-4", "plan.yaml", "trainer_log.jsonl"}
    assert latest_checkpoint(first.prepared.output_dir) == first.result.checkpoint
    rest = run_job(max_steps=6, resume=True)
    assert [record.step for record in rest.result.records] == [5, 6]


def test_a_kill_while_saving_leaves_no_checkpoint_by_that_name(
    run_job: RunJob, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing cleans up after a kill: what is half written must not be taken for whole."""

    class Killed(BaseException):
        pass

    first = run_job(max_steps=2)
    with monkeypatch.context() as patch:

        def kill(folder: Path) -> None:
            raise Killed

        patch.setattr(checkpoints, "flush", kill)
        with pytest.raises(Killed):
            run_job(max_steps=4, resume=True)
    folder = first.prepared.output_dir
    assert (folder / ".checkpoint-4.incomplete").is_dir()
    assert latest_checkpoint(folder) == folder / "checkpoint-2"
    assert prepare(job(resume=True)).resume_from == folder / "checkpoint-2"
    rest = run_job(max_steps=4, resume=True)
    assert rest.result.checkpoint == folder / "checkpoint-4"
    assert not (folder / ".checkpoint-4.incomplete").exists()


def test_the_latest_is_the_highest_number(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", ".checkpoint-11.incomplete"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("keep", "left"), [(None, {9, 10, 100}), (2, {10, 100}), (5, {9, 10, 100})]
)
def test_prune(tmp_path: Path, keep: int | None, left: set[int]) -> None:
    for number in (10, 9, 100):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "mine").mkdir()
    prune_checkpoints(tmp_path, keep)
    assert {path.name for path in tmp_path.iterdir()} == {
        "mine", *(f"checkpoint-{number}" for number in left)
    }  # fmt: skip


def test_progress_knows_the_job_it_belongs_to() -> None:
    job = Job(model_name_or_path="m", train_batch_size=2)
    PROGRESS.check(job, 5)
    for other in (replace(PROGRESS, global_batch_size=3), replace(PROGRESS, seed=1)):
        with pytest.raises(ConfigError, match="cannot be resumed"):
            other.check(job, 5)
    with pytest.raises(ConfigError, match="number of training samples was 5 and is 6"):
        PROGRESS.check(job, 6)


def test_a_state_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "optimizer.safetensors").touch()
    (tmp_path / "trainer_state.json").write_text('{"step": 3, "best": 1}')
    with pytest.raises(ConfigError, match=r"trainer_state\.json cannot be read"):
        read_progress(tmp_path)


def test_the_random_state_is_saved(run_job: RunJob) -> None:
    from safetensors.torch import load_file

    names = set(load_file(run_job().result.checkpoint / "optimizer.safetensors"))
    assert "random_state" in names
    assert sum(name.endswith("exp_avg_sq") for name in names) > 10
    assert not [name for name in names if name.endswith("master")], "equal to its parameter"


@pytest.mark.parametrize("saved_on", ["cpu", "card"])
def test_a_run_may_go_on_on_another_device(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch, saved_on: str
) -> None:
    """Only the device's own random state has nowhere to go then, or nothing to come from."""
    from safetensors.torch import load_file, save_file

    first = run_job(max_steps=2)
    path = first.result.checkpoint / "optimizer.safetensors"
    here = saved_states._random
    name, state = "device_random_state", torch.zeros(16, dtype=torch.uint8)
    if saved_on == "card":
        save_file({**load_file(path), name: state}, path)
    else:
        monkeypatch.setattr(
            saved_states, "_random", lambda engine: [*here(engine), Part(name, whole(state), state)]
        )
    rest = run_job(max_steps=4, resume=True)
    assert [record.step for record in rest.result.records] == [3, 4]
