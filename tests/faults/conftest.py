"""A job of two ranks on the tiny model, its plan given, and what it gives when nothing happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.faults.driver import STATED_SECONDS, losses, run

STEPS = 4


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    """Saves and evaluates after 2 of 4 steps; without an `output_dir`."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "rows.jsonl").write_text("".join(_row(number) for number in range(11)))
    policies = {
        "batch": {"micro_batch_size": 1, "accumulation_steps": 2},
        "precision": {"parameters": "fp32"},
        "sharding": {"ranks": 2, "zero_stage": 3},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump({"policies": policies}))
    return {
        "model_name_or_path": str(tiny_model_folder),
        "dataset": str(folder / "rows.jsonl"),
        "plan": str(folder / "plan.yaml"),
        "num_gpus": 2,
        "train_batch_size": 4,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "val_size": 2,
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "loss": "full",
        "gradient_checkpointing": False,
        "offload_optimizer": "none",
        "sample_prompt": "What is 3?",
        "max_new_tokens": 2,
        "ddp_timeout": STATED_SECONDS,
    }


def _row(number: int) -> str:
    question = f"What is {number}? " + "Say more. " * (number % 4)
    answer = "It is " + "very " * (number % 5) + f"{number}."
    turns = [("user", question), ("assistant", answer)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, job: dict[str, Any]) -> Path:
    """The output folder of a run in which nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(folder, job, "--output_dir", str(folder / "run"))
    assert (ended.code, ended.err) == (0, "")
    assert ended.left_behind == []
    assert list(losses(folder / "run")) == list(range(1, STEPS + 1))
    return folder / "run"
