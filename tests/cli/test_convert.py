"""`tightfit convert`, and the configs of other tools with the other verbs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.cli.arguments import load
from tightfit.cli.main import main
from tightfit.errors import ConfigError

CASE = str(Path(__file__).parent.parent / "cases" / "ds_zero3_offload.json")
JobFile = Callable[..., str]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_config_becomes_a_job(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "job.yaml"
    assert main(["convert", CASE, str(target)]) == 0
    assert yaml.safe_load(target.read_text()) == {
        "train_batch_size": 8, "gradient_accumulation_steps": 4, "learning_rate": 2e-5,
        "optim": "adamw", "max_grad_norm": 0.0, "precision": "fp32", "offload_optimizer": "cpu",
        "offload_param": "cpu", "zero_stage": 3, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "stage3_param_persistence_threshold: 100000" in out
    assert "small tensors ride along" in out
    assert "still to say: model_name_or_path, dataset, output_dir" in out


def test_nothing_is_written_over_without_force(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "accelerate.yaml"
    target.write_text("mine")
    argv = ["convert", CASE, str(target)]
    assert main(argv) == 2
    assert "is there already; give another file, or --force" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main([*argv, "--force", "--num_gpus", "2"]) == 0
    written = yaml.safe_load(target.read_text())
    assert (written["distributed_type"], written["num_processes"]) == ("FSDP", 2)


def test_standard_output_has_the_file_alone(capsys: Captured) -> None:
    assert main(["convert", CASE, "-", "--to", "deepspeed", "--bf16"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["zero_optimization"]["stage"] == 3
    assert content["bf16"] == {"enabled": True}
    assert "here:" in err
    assert main(["convert", CASE, "-", "--to", "deepspeed", "--gpu", "rtx-3060"]) == 0
    assert "Not in what was written, for DeepSpeed:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.json", "-"], "FROM: there is no file nowhere.json"),
        ([CASE, "-", "--num_gpus", "0"], "--num_gpus: '0' is not accepted"),
        ([CASE, "-", "--from", "accelerate"], "train_batch_size is not a key of accelerate"),
    ],
)
def test_complaints(argv: list[str], message: str, capsys: Captured) -> None:
    assert main(["convert", *argv]) == 2
    assert message in capsys.readouterr().err


# With the other verbs


def settings(job: Path | None, **flags: Any) -> dict[str, Any]:
    found, _ = load(job, {"model_name_or_path": "m", **flags})
    return found.model_dump(include=found.model_fields_set)


def test_flags_win_over_the_config() -> None:
    found = settings(None, deepspeed=CASE, learning_rate="1e-3", train_batch_size="16")
    assert (found["learning_rate"], found["train_batch_size"]) == (1e-3, 16)
    assert found["zero_stage"] == 3
    # What the config means by saying nothing gives way too.
    assert settings(None, deepspeed=CASE, precision="bf16")["precision"] == "bf16"


def test_a_job_names_its_config(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model_name_or_path: m\ndeepspeed: {CASE}\nzero_stage: auto\n")
    assert load(job, {})[0].offload_param == "cpu"
    job.write_text(f"model_name_or_path: m\ndeepspeed: {CASE}\nzero_stage: 2\n")
    with pytest.raises(ConfigError, match=r"zero_stage is 2, and .*line 6.* makes it 3; keep one"):
        load(job, {})
    assert load(job, {"zero_stage": "1"})[0].zero_stage == 1
    job.write_text("model_name_or_path: m\ndeepspeed: none\n")
    assert load(job, {})[1] is None


def test_the_arithmetic_of_a_batch_knows_the_ranks(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}
    config.write_text(json.dumps({**sizes, "gradient_accumulation_steps": 8}))
    with pytest.raises(ConfigError, match="train_batch_size 16 != 1 x 8 x 1"):
        settings(None, deepspeed=str(config))
    assert settings(None, deepspeed=str(config), num_gpus="2")["train_batch_size"] == 16
    assert settings(None, deepspeed=str(config), gpu="2xrtx-4090")["train_batch_size"] == 16


def test_a_contradiction_of_a_job_names_the_lines_that_make_it(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3}
    config.write_text(json.dumps(sizes, indent=1))
    said = (
        f"the nearest that are 15 and 18 ({config}, line 2: train_batch_size; "
        f"{config}, line 3: train_micro_batch_size_per_gpu)"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        settings(None, deepspeed=str(config))


def test_ranks_that_a_file_does_not_say_are_asked_for(tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "tt.toml"
    config.write_text("[parallelism]\ntensor_parallel_degree = 2\n")
    assert main(["convert", str(config), "-", "--to", "tightfit"]) == 2
    assert "give --num_gpus 2, or a multiple of it" in capsys.readouterr().err
    assert main(["convert", str(config), "-", "--to", "tightfit", "--num_gpus", "2"]) == 0


def test_two_configs_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="--config and deepspeed both name a config; keep one"):
        settings(None, config=CASE, deepspeed=CASE)


def test_a_config_is_billed_twice(tiny_model_folder: Path, capsys: Captured) -> None:
    argv = ["estimate", str(tiny_model_folder), "--config", CASE, "--cutoff_len", "32"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    bills = found["config"]["bills"]
    assert set(bills) == {"DeepSpeed (ZeRO-3)", "tightfit"}
    theirs, ours = bills["DeepSpeed (ZeRO-3)"], bills["tightfit"]
    # Two reduce buckets of 5e8 fp32 elements, which a gradient would fill one by one.
    assert theirs["tensor_bytes"] > 2 * 5e8 * 4 > ours["tensor_bytes"] > 0
    # Parameters, fp32 masters, two moments, fp32 gradients.
    assert theirs["host_bytes"] == 20 * found["parameters"]["trainable"]
    assert found["config"]["keys"]["zero_stage"] == 3
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "DeepSpeed (ZeRO-3)" in out
    assert "a config of DeepSpeed, here:" in out


def test_a_config_trains(
    job_file: JobFile, tmp_path: Path, no_measuring: None, capsys: Captured
) -> None:
    job = job_file(deepspeed=CASE, offload_optimizer=..., per_device_train_batch_size=...)
    assert main(["train", job, "--max_steps", "2"]) == 0
    assert "a whole layer is gathered at once" in capsys.readouterr().out
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())["policies"]
    assert plan["placement"]["parameters"] == "host"
    assert plan["batch"] == {"micro_batch_size": 2, "accumulation_steps": 4}
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").exists()


def test_fp16_trains_with_the_loss_scale_that_the_file_says(
    job_file: JobFile, tmp_path: Path
) -> None:
    config = tmp_path / "ds.json"
    block = {"enabled": True, "initial_scale_power": 9, "hysteresis": 1}
    config.write_text(json.dumps({"fp16": block, "gradient_accumulation_steps": 1}))
    job = job_file(deepspeed=str(config), offload_optimizer=...)
    assert main(["train", job, "--max_steps", "2"]) == 0
    steps = json.loads((tmp_path / "run" / "report.json").read_text())["steps"]
    assert [step["loss_scale"] for step in steps] == [512, 512]


def test_a_plan_is_written_for_another_tool(
    job_file: JobFile, tmp_path: Path, no_measuring: None, capsys: Captured
) -> None:
    target = tmp_path / "ds_config.json"
    argv = ["plan", job_file(offload_optimizer="cpu"), "--export", "deepspeed"]
    assert main([*argv, "--export_to", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert content["train_micro_batch_size_per_gpu"] == 2
    assert f"written: {target}" in capsys.readouterr().err
    assert main([*argv, "--export_to", str(target)]) == 2
    assert "is there already" in capsys.readouterr().err
