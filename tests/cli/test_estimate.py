"""`tightfit estimate`: the bill of a job exactly as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tightfit.cli.main import main

KEYS = {
    "fits", "limits", "peak_bytes", "phases", "kinds", "bill", "textbook", "plan", "parameters",
    "card", "notes", "machine_bytes",
}  # fmt: skip
JobFile = Callable[..., str]
Captured = pytest.CaptureFixture[str]


def test_it_exits_with_0_where_it_does_not_fit(tiny_model_folder: Path, capsys: Captured) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--memory_limit", "1MiB"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert set(found) == KEYS
    assert len(found["notes"]) == 1
    assert "priced for the CPU of this machine" in found["notes"][0]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "parameters trained, fp32; textbook model states" in out
    assert "missing" in out
    assert "Bill of micro-batch 1 x 1, 32 tokens" in out


def test_what_is_typed_is_billed(tiny_model_folder: Path, capsys: Captured) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--json"]
    typed = ["--gradient_checkpointing", "--finetuning_type", "lora", "--lora_rank", "2"]
    assert main([*argv, *typed]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["gradient_checkpointing"] == "true"
    assert found["plan"]["lora_rank"] == "2"
    assert found["parameters"]["frozen"] > found["parameters"]["trainable"] > 0
    assert found["plan"]["loss"] == "full"


def test_a_plan_file_is_billed_as_it_is(
    tiny_model_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("policies: {checkpointing: {enabled: true}}")
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--json"]
    assert main([*argv, "--plan", str(plan)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["gradient_checkpointing"] == "true"


def test_a_model_of_the_catalogue_needs_no_weights(capsys: Captured) -> None:
    assert main(["estimate", "Qwen/Qwen3-0.6B", "--cutoff_len", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.5e9 < found["parameters"]["trainable"] < 0.8e9
    parameters = found["parameters"]["trainable"] * 4
    assert found["kinds"]["device"]["parameters"] == parameters
    assert found["kinds"]["device"]["optimizer states"] >= 2 * parameters


def test_a_model_that_is_not_there(capsys: Captured) -> None:
    assert main(["estimate", "nowhere/model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nowhere/model" in err
    assert "Looked for" in err


def test_every_way_to_share_out_is_compared(tiny_model_folder: Path, capsys: Captured) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--num_gpus", "4"]
    assert main([*argv, "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in found["compare"]]
    assert names[:2] == ["DDP", "DDP, optimizer on host"]
    assert len(names) == 9
    assert [row["engine"] for row in found["elsewhere"]] == ["DDP"]
    assert main([*argv, "--compare"]) == 0
    out = capsys.readouterr().out
    assert "with other engines" in out
    assert "on 4 cards" in out
    for stage in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
        assert stage in out


def test_the_picture_is_a_new_file(
    tiny_model_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    picture = tmp_path / "bill.html"
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--html", str(picture)]
    assert main(argv) == 0
    page = picture.read_text()
    assert "<html" in page
    assert "optimizer states" in page
    assert main(argv) == 2
    assert "bill.html" in capsys.readouterr().err
    assert picture.read_text() == page


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (
            ["--optim", "adafactor", "--num_gpus", "2", "--zero_stage", "3"],
            "optim adafactor with zero_stage 3 (take zero_stage 0): closed form",
        ),
        (["--num_gpus", "1"], "no card here"),
    ],
)
def test_what_is_assumed_is_said(
    tiny_model_folder: Path, capsys: Captured, flags: list[str], note: str
) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", *flags]
    assert main([*argv, "--json"]) == 0
    assert any(note in said for said in json.loads(capsys.readouterr().out)["notes"])
    assert main(argv) == 0
    assert f"note: {note}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "fp16"],
        ["--gradient_checkpointing", "selective"],
        ["--attention", "eager"],
        ["--attention", "flash", "--precision", "bf16", "--num_gpus", "1"],
        ["--finetuning_type", "qlora"],
        ["--finetuning_type", "lora", "--quantization_bit", "8"],
        ["--num_gpus", "2", "--zero_stage", "0"],
        ["--num_gpus", "2", "--zero_stage", "1", "--gradient_accumulation_steps", "2"],
        ["--num_gpus", "2", "--zero_stage", "2", "--offload_optimizer", "nvme"],
        ["--num_gpus", "4", "--zero_stage", "3", "--tensor_parallel_size", "2"],
        ["--num_gpus", "8", "--tensor_parallel_size", "2", "--data_parallel_replicas", "2"],
        ["--num_gpus", "2", "--pipeline_parallel_size", "2", "--offload_activations"],
        ["--num_gpus", "2", "--pipeline_parallel_size", "2", "--pipeline_schedule", "gpipe"],
        ["--offload_param", "nvme", "--offload_optimizer", "cpu"],
        ["--optim", "adamw_8bit"],
        ["--loss", "chunked", "--optim", "sgd"],
    ],
    ids=" ".join,
)
def test_every_key_of_a_paper_can_be_typed(
    tiny_model_folder: Path, capsys: Captured, flags: list[str]
) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--json", *flags]
    assert main(argv) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"]["device"] > 0


def test_a_sequence_longer_than_the_positions_is_an_assumption(
    tiny_model_folder: Path, capsys: Captured
) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "100000", "--json"]
    config = json.loads((tiny_model_folder / "config.json").read_text())
    assert config["max_position_embeddings"] < 100000
    assert main([*argv, "--loss", "chunked"]) == 0
    assert any("positions" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_a_described_machine_is_shown_before_its_bill(
    tiny_model_folder: Path, capsys: Captured
) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--gpu", "2xrtx-4090"]
    assert main([*argv, "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "Described: 2 x GeForce RTX 4090, 2 machines, 23.51 GiB usable each" in out
    assert "device limit 23.51 GiB: fits" in out
    assert "note: network is not given: 10Gb between machines is assumed" in out
