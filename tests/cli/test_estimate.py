"""`tightfit estimate`: the bill of a job exactly as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tightfit.cli.main import main

JobFile = Callable[..., str]
Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("no_measuring")


def test_it_exits_with_0_where_it_does_not_fit(tiny_model_folder: Path, capsys: Captured) -> None:
    argv = ["estimate", str(tiny_model_folder), "--cutoff_len", "32", "--memory_limit", "1MiB"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["alternatives"] == []
    assert found["peak_bytes"] == found["plain_peak_bytes"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "parameters trained, fp32" in out
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
