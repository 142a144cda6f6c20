"""`tightfit plan`: tables for people, one documented object for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.main import main

JobFile = Callable[..., str]
Captured = pytest.CaptureFixture[str]

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
KEYS = {
    "fits", "peak_bytes", "phases", "kinds", "plan", "step_seconds", "step_seconds_by_part",
    "parameters", "limits", "plain_peak_bytes", "reasons", "notes", "alternatives", "rates",
    "bottleneck", "slower",
}  # fmt: skip
SHORTAGE_KEYS = {"error", "shortage", "advice"}
TIERS = {"device", "host", "pinned", "nvme"}

HOST_IF_NEEDED = {
    "offload_optimizer": "auto", "offload_optimizer_fraction": 1, "offload_param": "none",
    "offload_activations": False, "cutoff_len": 32,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_measuring")


def planned(capsys: Captured, *argv: str) -> dict[str, Any]:
    """stdout of the command, which must be one JSON object and nothing else."""
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    content = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(content, dict)
    return content


def keys_of(content: Any) -> Iterator[str]:
    """Every key at every depth."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from keys_of(value)
    elif isinstance(content, list):
        for value in content:
            yield from keys_of(value)


def documented() -> set[str]:
    return set(re.findall(r"`([^`]+)`", PAGE.read_text()))


def test_the_object(job_file: JobFile, capsys: Captured) -> None:
    path = job_file(**HOST_IF_NEEDED)
    plain = planned(capsys, "plan", path)
    limit = plain["peak_bytes"]["device"] - 1
    found = planned(capsys, "plan", path, "--memory_limit", str(limit))
    assert set(found) == KEYS
    assert found["fits"] is True
    assert set(found["peak_bytes"]) == set(found["plain_peak_bytes"]) == TIERS
    assert found["peak_bytes"]["device"] <= limit < found["plain_peak_bytes"]["device"]
    for tier, peak in found["peak_bytes"].items():
        assert peak == max(tiers[tier] for tiers in found["phases"].values())
        assert peak == sum(found["kinds"].get(tier, {}).values())
    assert found["plan"] == {
        "batch": "2 x 1", "gradient_checkpointing": "false", "loss": "full",
        "attention": "sdpa", "offload_optimizer": "cpu", "offload_param": "none",
        "offload_activations": "false", "precision": "fp32", "optim": "adamw",
        "offload_optimizer_fraction": "1", "lazy_step": "false",
        "finetuning_type": "full",
    }  # fmt: skip
    parts = dict(found["step_seconds_by_part"])
    assert parts.pop("total") == found["step_seconds"] == pytest.approx(sum(parts.values()))
    assert found["limits"]["device_bytes"] == limit
    assert len(found["reasons"]) == 1
    (alternative,) = found["alternatives"]
    assert alternative["plan"]["offload_optimizer"] == "none"
    assert alternative["device_peak_bytes"] == limit + 1
    assert "too much" in alternative["verdict"]
    assert set(keys_of(found["slower"])) <= documented()


def test_the_page_names_every_key(job_file: JobFile, tmp_path: Path, capsys: Captured) -> None:
    """Of plan, report and log of a run that has everything."""
    path = job_file(
        finetuning_type="lora", lora_rank=2, val_size=2, offload_optimizer="cpu",
        sample_prompt="What?", max_new_tokens=2,
    )  # fmt: skip
    assert main(["train", path]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    log = (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()
    written = [report, *map(json.loads, log), planned(capsys, "estimate", path, "--compare")]
    assert len(report["answers"]) == 2
    missing = set(keys_of(written)) - documented()
    assert not missing


def test_the_page_names_every_word() -> None:
    from tightfit.bill.table import Kind, Phase
    from tightfit.policies import Tier

    words = {str(word) for kind in (Kind, Phase, Tier) for word in kind}
    assert words <= documented()


def test_the_page_names_no_key_that_is_gone() -> None:
    others = "\n## `tightfit probe"  # the verb's own test knows its keys
    page = PAGE.read_text().partition(others)[0]
    tables = re.findall(r"^\| `(\w+)` \|", page, flags=re.M)
    assert set(tables) >= KEYS | SHORTAGE_KEYS
    gone = set(tables) - KEYS - SHORTAGE_KEYS - {
        "predicted", "measured", "differences", "peak_error", "steps", "evaluations", "answers",
        "event", "step", "loss", "seconds", "epoch", "learning_rate", "grad_norm", "tokens",
        "device_bytes", "device_peak_bytes", "nvme_written_bytes", "communication_seconds",
        "communication_share", "skipped", "loss_scale", "bill", "textbook", "machine_bytes", "card",
        "notes", "compare", "elsewhere", "plan_changes", "config", "buying",
    }  # fmt: skip
    assert not gone


def test_the_tables(job_file: JobFile, capsys: Captured) -> None:
    path = job_file(**HOST_IF_NEEDED)
    limit = planned(capsys, "plan", path)["peak_bytes"]["device"] - 1
    assert main(["plan", path, "--memory_limit", str(limit)]) == 0
    out = capsys.readouterr().out
    plain, rest = out.split("Bill of plain training")[1].split("Plan: ")
    assert re.search(r"at the peak +device \(\w+\)", plain)
    assert re.search(r"parameters +[\d.]+ KiB", plain)
    assert re.search(r"peak +[\d.]+ MiB", plain)
    assert "1 B missing" in plain
    assert "gradients and optimizer on the host: " in rest
    assert "turned down, fastest first" in rest
    bill = rest.split("Bill of the plan")[1]
    assert re.search(r"at the peak +device \(\w+\) +host \(\w+\)", bill)
    assert ": fits" in bill


def test_what_does_not_fit_is_an_object_too(job_file: JobFile, capsys: Captured) -> None:
    path = job_file(memory_limit="10KiB")
    assert main(["plan", path, "--json"]) == 3
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found) == SHORTAGE_KEYS
    assert err.startswith(f"error: {found['error']}\n  device: ")
    assert set(found["shortage"]) == {"device"}
    needed = found["shortage"]["device"] + 10 * 1024
    assert f"the same plan with memory_limit: {-(-needed // 2**20)}MiB" in found["advice"]
    assert re.findall(r"^  would fit: (.+)$", err, re.M) == found["advice"]
    assert main(["plan", path]) == 3
    assert capsys.readouterr().out == ""


def test_a_plan_file_that_does_not_fit_is_an_object_too(
    job_file: JobFile, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["train", job_file()]) == 0
    capsys.readouterr()
    written = str(tmp_path / "run" / "plan.yaml")
    assert main(["plan", job_file(memory_limit="10KiB", plan=written), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert set(found["shortage"]) == {"device"}
    assert found["advice"][-1] == "raise memory_limit"


def test_planning_needs_no_data_and_writes_nothing(
    job_file: JobFile, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["plan", job_file(dataset=..., cutoff_len=32)]) == 0
    assert not (tmp_path / "run").exists()


# A machine that is described, and nothing to choose.
DESCRIBED = [
    "--gpu", "rtx-3060", "--ram", "16GiB", "--loss", "full", "--gradient_checkpointing", "false",
    "--offload_optimizer", "none", "--offload_param", "none", "--offload_activations", "false",
    "--zero_stage", "0", "--tensor_parallel_size", "1", "--pipeline_parallel_size", "1",
    "--per_device_train_batch_size", "1",
]  # fmt: skip


def test_what_buying_would_change(job_file: JobFile, capsys: Captured) -> None:
    path = job_file(output_dir=None)
    found = planned(capsys, "plan", path, *DESCRIBED, "--buying")
    assert set(found) == KEYS | {"buying"}
    assert [one["name"] for one in found["buying"]] == ["a second card", "64.00 GiB more RAM"]
    assert set(keys_of(found["buying"])) <= documented()
    cards, ram = found["buying"]
    assert cards["said"] == "micro-batch 1 x 1, 2 ranks, data parallel"
    assert (ram["speedup"], ram["said"]) == (1.0, "the same plan")
    assert main(["plan", path, *DESCRIBED, "--buying"]) == 0
    out = capsys.readouterr().out
    assert "What buying would change\n  a second card: " in out
    assert "  64.00 GiB more RAM: 1.0x (the same plan)" in out


def test_the_largest_model(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightfit.facts.catalogue import find_in_catalogue
    from tightfit.planner import largest

    smallest = find_in_catalogue("HuggingFaceTB/SmolLM2-135M")
    monkeypatch.setattr(largest, "models_by_size", lambda: [smallest])
    words = ["plan", "--largest", *DESCRIBED, "--cutoff_len", "16", "--train_batch_size", "1"]
    assert main([*words, "--finetuning_type", "lora", "--quantization_bit", "4", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["way"], found["model"]) == ("QLoRA", "HuggingFaceTB/SmolLM2-135M")
    assert set(keys_of(found)) - set(keys_of(found["plan"])) <= documented()
    monkeypatch.setattr(largest, "models_by_size", list)
    assert main([*words, "--finetuning_type", "full"]) == 3
    assert "none fits" in capsys.readouterr().out


def test_the_largest_model_is_no_plan_of_one(capsys: Captured) -> None:
    assert main(["plan", "--largest", "--buying"]) == 2
    assert "leave out --buying and --export" in capsys.readouterr().err
