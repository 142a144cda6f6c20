"""What a Job accepts by itself, before files and flags."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"offload_optimizer": "none", "lazy_step": True}, "lazy_step: true"),
        ({"offload_optimizer": "none", "offload_optimizer_fraction": 0.5},
         "offload_optimizer_fraction: 0.5"),
        ({"offload_param": "none", "offload_param_fraction": "0.5"}, "offload_param_fraction: 0.5"),
        ({"offload_param": "none", "offload_activations": False, "offload_prefetch": 2},
         "offload_prefetch: 2"),
        ({"offload_param": "cpu", "offload_optimizer": "none"},
         "offload_param: cpu while offload_optimizer: none"),
        ({"offload_param": "nvme", "offload_optimizer_fraction": 0.5},
         r"offload_param: nvme while offload_optimizer_fraction: 0\.5 .*leave offload_opt"),
        ({"optim_master": "split", "precision": "fp32"}, "optim_master: split"),
        ({"optim_master": "split", "finetuning_type": "lora"}, "optim_master: split"),
        ({"optim_master": "split", "offload_optimizer": "cpu", "offload_param": "none"},
         "optim_master: split"),
    ],
)  # fmt: skip
def test_keys_of_placement_that_contradict_each_other(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        job(**settings)


def test_keys_of_placement_that_go_together() -> None:
    job(offload_optimizer="cpu", offload_optimizer_fraction=0.3, lazy_step=True)
    job(offload_param="cpu", offload_optimizer_fraction=1, offload_param_fraction=0.5)
    job(offload_param="cpu", offload_optimizer="none", finetuning_type="lora")
    job(offload_activations=True, offload_param="none", offload_prefetch=0)
    job(optim_master="split", precision="bf16", offload_optimizer="cpu")


def test_where_the_disk_tier_is() -> None:
    assert job().disk_folder == Path("offload")
    assert job(output_dir="/runs/a").disk_folder == Path("/runs/a/offload")
    assert job(output_dir="/runs/a", offload_folder="/fast").disk_folder == Path("/fast")


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
        {"offload_optimizer_fraction": 0},
        {"offload_param_fraction": 1.5},
        {"offload_prefetch": -1},
        {"nvme_limit": "12"},
    ],
)
def test_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        job(**settings)
