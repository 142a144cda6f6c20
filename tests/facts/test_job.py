"""What a Job accepts by itself, before files and flags."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tightfit.facts.job import Job


def job(**settings: Any) -> Job:
    return Job.model_validate({"model_name_or_path": "m", **settings})


def test_defaults_are_those_of_hugging_face() -> None:
    defaults = job()
    assert defaults.learning_rate == 5e-5
    assert defaults.num_train_epochs == 3
    assert defaults.max_grad_norm == 1
    assert defaults.max_steps == -1
    assert defaults.seed == 42


def test_every_key_is_described_in_one_sentence() -> None:
    for key, field in Job.model_fields.items():
        assert field.description, key
        assert field.description.endswith("."), key


@pytest.mark.parametrize(
    ("micro", "steps", "total", "expected"),
    [
        ("auto", "auto", 8, 8),
        (2, 4, 8, 8),
        (2, 4, "auto", 8),
        (2, "auto", "auto", 2),
        (2, "auto", 8, 8),
    ],
)
def test_global_batch(micro: Any, steps: Any, total: Any, expected: int) -> None:
    settings = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": total,
    }
    assert job(**settings).global_batch_size == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"train_batch_size": 8, "per_device_train_batch_size": 3},
        {"train_batch_size": 8, "gradient_accumulation_steps": 3},
        {
            "train_batch_size": 8,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
    ],
)
def test_batch_sizes_must_agree(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="train_batch_size 8"):
        job(**settings)


@pytest.mark.parametrize("value", [True, "true"])
def test_words_that_yaml_turns_into_booleans(value: Any) -> None:
    assert job(gradient_checkpointing=value).gradient_checkpointing == "true"
    assert job(eval_strategy=False, save_strategy=False).eval_strategy == "no"
    assert job(offload_optimizer=None).offload_optimizer == "none"


@pytest.mark.parametrize(
    "settings",
    [
        {"unheard_of": 1},
        {"learning_rate": 0},
        {"learning_rate": -1},
        {"lora_dropout": 1},
        {"cutoff_len": 0},
        {"max_steps": -2},
        {"memory_limit": "much"},
        {"overlong": "ignore"},
        {"allow": ["anything"]},
    ],
)
def test_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        job(**settings)
