"""`tightfit train`: what it prints and writes, and that a job that cannot run changes nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.main import main
from tightfit.facts.job import Job
from tightfit.training import checkpoint
from tightfit.training import run as runs
from tightfit.training.checkpoint_folders import latest_checkpoint
from tightfit.training.output import open_output_dir

JobFile = Callable[..., str]
Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("no_measuring")


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below with a hash of what is in it, every folder with a slash."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "/"
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """Something that looks like a run of days."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"days of work")
    (folder / "trainer_log.jsonl").write_text("{}\n")
    return folder


# A run that works


def test_a_run_from_a_file(job_file: JobFile, tmp_path: Path, capsys: Captured) -> None:
    path = job_file(val_size=2, memory_limit="64MiB", sample_prompt="What is 3?", max_new_tokens=4)
    assert main(["train", path, "--preview", "1"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "CPU:", "samples: 6 to train, 2 held out", "Bill of plain training", "at the peak",
        "parameters", "optimizer states", "peak by phase", "backward", "Plan: micro-batch 2 x 1",
        "plain training; no technique is needed", "device limit 64.0 MiB: fits", "step 2/2",
        "held-out loss", "predicted beside measured", "device peak: predicted +", "Q: What is 3?",
        "before:", "after:", "checkpoint-2",
    ):  # fmt: skip
        assert expected in out, expected
    assert "…" not in out, "a table was cut"
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"checkpoint-2", "plan.yaml", "report.json", "trainer_log.jsonl"}


def test_every_run_is_remembered(
    job_file: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    assert main(["train", job_file()]) == 0
    assert main(["train", job_file(output_dir=str(tmp_path / "again"))]) == 0
    report = json.loads((tmp_path / "again" / "report.json").read_text())
    lines = (tmp_path / "cache" / "history.jsonl").read_text().splitlines()
    assert len(lines) == 2
    entry = json.loads(lines[1])
    assert entry["step"] == report["step_seconds"]
    assert (entry["ranks"], entry["steps"], entry["rates"]) == (1, 1, "quick")
    assert entry["parts"]["communication"] == {"predicted": 0.0, "measured": 0.0}
    assert entry["parts"]["compute"]["measured"] is None
    assert entry["policies"].startswith("micro-batch 2 x 1")


def test_a_history_that_cannot_be_written_is_a_note(
    job_file: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "file"))
    assert main(["train", job_file()]) == 0
    assert "the history of runs cannot be written" in capsys.readouterr().out


def test_the_report_lays_predicted_beside_measured(job_file: JobFile, tmp_path: Path) -> None:
    assert main(["train", job_file(val_size=2, memory_limit="64MiB")]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    totals = [row for row in report["differences"] if row["kind"] is None]
    assert {row["phase"] for row in totals} >= {"forward", "backward", "step", "eval", "save"}
    for row in totals:
        happened = row["phase"] != "resume"
        assert row["predicted_bytes"] >= row["measured_bytes"]
        assert (row["measured_bytes"] > 0) is happened
        if not happened:
            continue
        measured = report["measured"][row["phase"]][row["tier"]]
        assert sum(measured.values()) == row["measured_bytes"]
        error = (row["predicted_bytes"] - row["measured_bytes"]) / row["measured_bytes"]
        assert row["error"] == pytest.approx(error)
    assert 0 <= report["peak_error"] <= 0.03
    assert [step["step"] for step in report["steps"]] == [1, 2]
    assert len(report["evaluations"]) == 2


def test_a_flag_wins_over_the_file(job_file: JobFile, tmp_path: Path) -> None:
    assert main(["train", job_file(), "--max_steps", "1"]) == 0
    log = (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1]


def test_a_tight_limit_changes_the_plan_and_shows_the_shortage(
    job_file: JobFile, capsys: Captured
) -> None:
    path = job_file(offload_optimizer="auto")
    assert main(["plan", path, "--json", "--cutoff_len", "22"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_bytes"]["device"]
    assert main(["train", path, "--cutoff_len", "22", "--memory_limit", str(peak - 1)]) == 0
    out = capsys.readouterr().out
    assert "missing" in out
    assert re.search(r"\+ .+: .+ less on the device", out)
    assert "turned down, fastest first" in out


def test_a_plan_can_be_edited_and_passed_back(job_file: JobFile, tmp_path: Path) -> None:
    path = job_file(learning_rate=1e-3, gradient_checkpointing=...)
    assert main(["train", path]) == 0
    plan = tmp_path / "edited.yaml"
    text = (tmp_path / "run" / "plan.yaml").read_text()
    assert text.count("enabled: false") == 1
    plan.write_text(text.replace("enabled: false", "enabled: true"))
    assert main(["train", path, "--plan", str(plan), "--overwrite_output_dir"]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["plan"]["plan"]["gradient_checkpointing"] == "true"
    assert report["steps"][0]["learning_rate"] == pytest.approx(1e-3)


def test_a_prompt_without_a_chat_template_is_continued_as_text(
    job_file: JobFile, model_without_template: str, text_rows: Path, capsys: Captured
) -> None:
    path = job_file(model_name_or_path=model_without_template, dataset=str(text_rows))
    assert main(["train", path, "--sample_prompt", "One, two"]) == 0
    assert "Q: One, two" in capsys.readouterr().out


@pytest.fixture
def text_rows(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"One, two, {n}."}) for n in range(6)))
    return path


@pytest.fixture
def model_without_template(tmp_path: Path, tiny_model_folder: Path) -> str:
    return str(copy_of_model(tiny_model_folder, tmp_path / "model", leave="chat_template.jinja"))


def copy_of_model(source: Path, target: Path, leave: str) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.name != leave:
            (target / path.name).write_bytes(path.read_bytes())
    return target


# Jobs that cannot run: exit code 2, a message, nothing written or overwritten

BAD_KEYS = [
    ({"learning_rte": 1e-4}, ["job.yaml: learning_rte", "learning_rate?"]),
    ({"learning_rate": "fast"}, ["job.yaml: learning_rate", "'fast'", "number"]),
    ({"learning_rate": -1}, ["learning_rate", "above 0"]),
    ({"max_steps": 1.5}, ["max_steps", "whole number"]),
    ({"max_steps": -2}, ["max_steps", "-1"]),
    ({"lora_dropout": 1}, ["lora_dropout", "below 1"]),
    ({"memory_limit": "900 bananas"}, ["memory_limit", "900MiB"]),
    ({"overlong": "cut"}, ["overlong", "drop", "truncate", "error"]),
    ({"train_batch_size": 3}, ["train_batch_size 3", "per_device_train_batch_size 2"]),
    ({"dataset": "nowhere.jsonl"}, ["nowhere.jsonl"]),
    ({"dataset": ...}, ["dataset", ".jsonl"]),
    ({"output_dir": ...}, ["output_dir"]),
    ({"model_name_or_path": ...}, ["model_name_or_path is missing"]),
    ({"model_name_or_path": "nowhere/model"}, ["nowhere/model", "Looked for", "Hub cache"]),
    ({"model_name_or_path": "Qwen/Qwen3-8B"}, ["Qwen/Qwen3-8B", "weights"]),
    ({"val_size": 8}, ["val_size 8", "lower val_size"]),
    ({"per_device_train_batch_size": 9}, ["8 samples", "global batch of 9"]),
    ({"lr_scheduler_type": "linaer"}, ["lr_scheduler_type", "linaer", "linear"]),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type", "cosine"]),
    ({"lr_scheduler_type": "warmup_stable_decay"}, ["lr_scheduler_type"]),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, ["lr_scheduler_type", "min_lr"]),
    ({"finetuning_type": "lora", "lora_target": "wq"}, ["lora_target wq", "q_proj"]),
    ({"overlong": "error", "cutoff_len": 8}, ["8 rows", "cutoff_len 8", "row 1, 2", "drop"]),
    ({"overlong": "drop", "cutoff_len": 8}, ["all 8", "cutoff_len 8", "raise cutoff_len"]),
    ({"sample_prompt": "  "}, ["sample_prompt is empty"]),
    ({"plan": "nowhere.yaml"}, ["nowhere.yaml does not exist"]),
    ({"eval_dataset": "nowhere.jsonl"}, ["nowhere.jsonl"]),
]


@pytest.mark.parametrize(("keys", "said"), BAD_KEYS, ids=lambda value: str(value)[:40])
def test_a_bad_job(
    keys: dict[str, Any],
    said: list[str],
    job_file: JobFile,
    old_run: Path,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    """Even with leave to overwrite: the old run is deleted only for one that can run."""
    path = job_file(**({"overwrite_output_dir": True} | keys))
    refused(["train", path], said, tmp_path, capsys)
    assert (old_run / "checkpoint-7" / "model.safetensors").read_bytes() == b"days of work"


def refused(argv: list[str], said: list[str], folder: Path, capsys: Captured, code: int = 2) -> str:
    """Run the command; it must fail with `code`, say all of `said` and change no file."""
    before = snapshot(folder)
    assert main(argv) == code
    message = capsys.readouterr().err
    for words in said:
        assert words in message, message
    assert message.count("error: ") >= 1
    assert "Traceback" not in message
    assert "\n\n" not in message.strip()
    assert snapshot(folder) == before
    return message


BAD_FILES = [
    ("", ["rows.jsonl", "no rows"]),
    ('{"text": "a b c"}\n{"text": "a b', ["rows.jsonl", "row 2"]),
    ('{"messages": [{"role": "user", "content": "Hi"}]}', ["rows.jsonl", "row 1", "assistant"]),
    ('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}', ["rows.jsonl", "row 1"]),
    ('{"question": "Hi"}', ["rows.jsonl", "row 1", "messages", "text"]),
    ("[1, 2]\n", ["rows.jsonl", "row 1"]),
]


@pytest.mark.parametrize(("content", "said"), BAD_FILES, ids=lambda value: str(value)[:40])
def test_bad_data(
    content: str,
    said: list[str],
    job_file: JobFile,
    rows: Path,
    old_run: Path,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    rows.write_text(content)
    refused(["train", job_file(overwrite_output_dir=True)], said, tmp_path, capsys)


@pytest.mark.parametrize(
    ("overlong", "said"), [("drop", "dropped, longer than"), ("truncate", "truncated to")]
)
def test_overlong_rows_are_counted(
    job_file: JobFile, rows: Path, overlong: str, said: str, capsys: Captured
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "and so on " * 30},
    ]
    with rows.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    assert main(["train", job_file(cutoff_len=64, overlong=overlong)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{said} cutoff_len 64: 1 (" in out
    assert "rows.jsonl row 9)" in out


def test_an_output_dir_that_holds_a_run(
    job_file: JobFile, old_run: Path, tmp_path: Path, capsys: Captured
) -> None:
    said = ["already holds a run", "checkpoint-7", "--resume", "--overwrite_output_dir"]
    refused(["train", job_file()], said, tmp_path, capsys)


def test_nothing_to_resume(job_file: JobFile, tmp_path: Path, capsys: Captured) -> None:
    refused(["train", job_file(), "--resume"], ["nothing to resume", "run"], tmp_path, capsys)
    assert not (tmp_path / "run").exists()


def test_resume_and_overwrite(
    job_file: JobFile, old_run: Path, tmp_path: Path, capsys: Captured
) -> None:
    argv = ["train", job_file(), "--resume", "--overwrite_output_dir"]
    refused(argv, ["resume", "overwrite_output_dir", "contradict"], tmp_path, capsys)


def test_an_output_dir_that_is_a_file(job_file: JobFile, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/below"):
        path = job_file(output_dir=str(tmp_path / name))
        refused(["train", path], ["output_dir", "is a file"], tmp_path, capsys)


def test_no_config_file(tmp_path: Path, capsys: Captured) -> None:
    argv = ["train", str(tmp_path / "nowhere.yaml")]
    refused(argv, ["there is no file", "nowhere.yaml"], tmp_path, capsys)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_model_without_weights(
    job_file: JobFile,
    old_run: Path,
    tiny_model_folder: Path,
    tmp_path: Path,
    pickled: bool,
    capsys: Captured,
) -> None:
    folder = copy_of_model(tiny_model_folder, tmp_path / "model", leave="model.safetensors")
    if pickled:
        (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    path = job_file(model_name_or_path=str(folder), overwrite_output_dir=True)
    said = ["no weights", str(folder), ".safetensors", *(["pickle"] * pickled)]
    refused(["train", path], said, tmp_path, capsys)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", b"cut off", ["broken"]),
        ("config.json", None, ["not those of its config.json"]),
    ],
)
def test_weights_that_cannot_be_used(
    job_file: JobFile,
    old_run: Path,
    tiny_model_folder: Path,
    tmp_path: Path,
    file: str,
    content: bytes | None,
    said: list[str],
    capsys: Captured,
) -> None:
    """Found only when the weights are read, and still before the old run is deleted."""
    folder = copy_of_model(tiny_model_folder, tmp_path / "model", leave=file)
    config = json.loads((tiny_model_folder / "config.json").read_text())
    deeper = json.dumps(config | {"num_hidden_layers": 4}).encode()
    (folder / file).write_bytes(deeper if content is None else content)
    path = job_file(model_name_or_path=str(folder), overwrite_output_dir=True)
    refused(["train", path], [*said, str(folder)], tmp_path, capsys)


# A limit that is too small, and memory that runs out


def test_a_limit_too_small_for_any_plan(
    job_file: JobFile, old_run: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = job_file(memory_limit="100KiB", overwrite_output_dir=True)
    said = ["nothing fits", "more than the limit", "would fit", "memory_limit: "]
    refused(["train", path], said, tmp_path, capsys, code=3)


def test_a_plan_that_does_not_fit(job_file: JobFile, tmp_path: Path, capsys: Captured) -> None:
    path = job_file()
    assert main(["train", path]) == 0
    peak = json.loads((tmp_path / "run" / "report.json").read_text())["plan"]["peak_bytes"]
    plan = str(tmp_path / "run" / "plan.yaml")
    limit = str(peak["device"] - 1)
    argv = ["train", path, "--plan", plan, "--memory_limit", limit, "--overwrite_output_dir"]
    capsys.readouterr()
    refused(argv, ["this plan needs", "1 B more"], tmp_path, capsys, code=3)


def test_memory_that_runs_out_is_told_not_traced(
    job_file: JobFile, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from tightfit.training import leg

    monkeypatch.setattr(leg, "enforced_bytes", lambda job, plan: 1_700_000)
    assert main(["train", job_file(memory_limit="64MiB")]) == 1
    message = capsys.readouterr().err
    assert "error: out of memory although the bill fitted" in message
    assert "report the case" in message
    assert "memory_limit" in message
    assert "Traceback" not in message


# Real processes


ENTRY = "from tightfit.cli.main import entry_point; entry_point()"


def start(path: str, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, "train", path, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
    )


def test_an_interrupted_run_saves_and_can_be_resumed(job_file: JobFile, tmp_path: Path) -> None:
    path = job_file(max_steps=400, learning_rate=1e-3)
    process = start(path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/400"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 3 <= step < 400
    assert f"stopped after step {step}" in errors
    assert main(["train", path, "--resume", "--max_steps", str(step + 1)]) == 0
    lines = (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert [record["step"] for record in log] == list(range(1, step + 2))


def test_the_exit_code_reaches_the_shell(job_file: JobFile) -> None:
    process = start(job_file(learning_rte=1))
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert errors.startswith("error: ")


def test_a_finished_run_is_left_as_it_is(
    job_file: JobFile, tmp_path: Path, capsys: Captured
) -> None:
    path = job_file(max_steps=2)
    assert main(["train", path]) == 0
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert main(["train", path, "--resume"]) == 0
    assert "finished at step 2" in capsys.readouterr().out
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "-1"], "from 0 to 4294967295"),
        (["--cutoff_len", "9" * 23], "at most 16777216"),
        (["--train_batch_size", "100000000000"], "from 1 to 65536"),
        (["--memory_limit", "8"], "write a unit"),
    ],
)
def test_numbers_that_nobody_means(
    job_file: JobFile, tmp_path: Path, capsys: Captured, flags: list[str], said: str
) -> None:
    refused(["train", job_file(), *flags], [flags[0], said], tmp_path, capsys)


# What cannot be written


@pytest.mark.parametrize("name", ["plan.yaml", "trainer_log.jsonl", "report.json"])
def test_a_file_that_there_is_no_room_for_is_named(
    job_file: JobFile,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Each becomes a device that is always full as soon as the folder is made."""

    def open_and_fill(job: Job, folder: Path) -> None:
        open_output_dir(job, folder)
        (folder / name).symlink_to("/dev/full")

    monkeypatch.setattr(runs, "open_output_dir", open_and_fill)
    assert main(["train", job_file()]) == 1
    said = capsys.readouterr().err
    path = tmp_path / "run" / name
    assert f"error: {path} could not be written (No space left on device). Make room" in said
    assert "Traceback" not in said
    saved = latest_checkpoint(tmp_path / "run")
    assert saved == (tmp_path / "run" / "checkpoint-2" if name == "report.json" else None)


def test_a_checkpoint_that_may_not_be_deleted_is_named(
    job_file: JobFile, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is whole by then, and what is left of the old one is no checkpoint any more."""

    def refuse(folder: Path, *args: Any, **keys: Any) -> None:
        if "checkpoint-1" in folder.name and folder.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    path = job_file(save_strategy="steps", save_steps=1, save_total_limit=1)
    assert main(["train", path]) == 1
    said = capsys.readouterr().err
    old = tmp_path / "run" / "checkpoint-1"
    assert (
        f"error: {old} could not be deleted, as save_total_limit asks (Permission denied)" in said
    )
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    assert not old.exists()
