"""plan.yaml: read back as written, editable, and every mistake in it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.errors import ConfigError, DoesNotFitError, InputError
from tightfit.planner.plan import Plan
from tightfit.planner.plan_file import read_policies, write_plan
from tightfit.policies import CheckpointingPolicy, OptimizerPolicy, PlacementPolicy, Tier

Planner = Callable[..., Plan]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def tight(plan: Planner, peaks: list[int]) -> Plan:
    return plan(memory_limit=peaks[0], learning_rate=0.5)


@pytest.fixture
def path(tight: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(tight, path)
    return path


def edit(path: Path, change: Edit) -> None:
    content = yaml.safe_load(path.read_text())
    change(content["policies"])
    path.write_text(yaml.safe_dump(content))


def test_round_trip(tight: Plan, path: Path, plan: Planner, peaks: list[int]) -> None:
    assert read_policies(path, OptimizerPolicy()) == replace(
        tight.policies, optimizer=OptimizerPolicy()
    )
    again = plan(plan=str(path), memory_limit=peaks[0], learning_rate=0.5)
    assert again.policies == tight.policies
    assert again.bill == tight.bill


def test_round_trip_of_adapters(plan: Planner, tmp_path: Path) -> None:
    chosen = plan(finetuning_type="lora", lora_rank=2, lora_target="q_proj,v_proj")
    write_plan(chosen, tmp_path / "plan.yaml")
    assert read_policies(tmp_path / "plan.yaml", OptimizerPolicy()).adapter == (
        chosen.policies.adapter
    )


def test_round_trip_of_a_placement(path: Path) -> None:
    """With every field that says where something lives and how much of it."""
    away = PlacementPolicy(
        Tier.HOST, Tier.NVME, Tier.HOST, Tier.HOST,
        parameter_fraction=0.25, prefetch=3, lazy_step=True,
    )  # fmt: skip
    written = {field.name: getattr(away, field.name) for field in fields(away)}
    edit(
        path, lambda policies: policies.update(placement={k: plain(v) for k, v in written.items()})
    )
    assert read_policies(path, OptimizerPolicy()).placement == away


def plain(value: object) -> object:
    return str(value) if isinstance(value, Tier) else value


def test_a_person_can_read_it(path: Path, tight: Plan) -> None:
    text = path.read_text()
    assert text.startswith("# A plan of tightfit.")
    assert "!!" not in text, "python objects are not for people"
    content = yaml.safe_load(text)
    assert content["policies"]["batch"] == {"micro_batch_size": 1, "accumulation_steps": 2}
    assert content["policies"]["placement"]["optimizer_states"] == "host"
    assert content["reasons"] == list(tight.reasons)
    assert len(content["turned_down"]) == len(tight.alternatives)


def test_an_edited_choice_is_used_and_billed_anew(path: Path, tight: Plan, plan: Planner) -> None:
    edit(path, lambda policies: policies["checkpointing"].update(enabled=False))
    edited = plan(plan=str(path), learning_rate=0.5)
    assert edited.policies == replace(tight.policies, checkpointing=CheckpointingPolicy(False))
    assert edited.bill.peak_bytes(Tier.DEVICE) > tight.bill.peak_bytes(Tier.DEVICE)


def test_what_is_slower_is_there_too(plan: Planner, tmp_path: Path) -> None:
    chosen = plan(memory_limit="1GiB")
    write_plan(chosen, tmp_path / "plan.yaml")
    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert content["slower"] == chosen.to_json()["slower"]
    assert "slower: " in str(content["slower"]) or "no faster: " in str(content["slower"])


def test_an_edited_choice_that_does_not_fit(path: Path, plan: Planner, peaks: list[int]) -> None:
    edit(path, lambda policies: policies["checkpointing"].update(enabled=False))
    with pytest.raises(DoesNotFitError, match=r"leave out --plan.*or raise memory_limit") as raised:
        plan(plan=str(path), memory_limit=peaks[0])
    assert raised.value.missing_bytes > 0


def test_an_allowed_optimizer_is_in_the_plan_and_must_be_allowed_again(
    plan: Planner, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    chosen = plan(optim="adamw_8bit")
    write_plan(chosen, path)
    assert plan(plan=str(path), allow=["8bit-optimizer"]).policies == chosen.policies
    with pytest.raises(ConfigError, match=r"allow: \[8bit-optimizer\]"):
        plan(plan=str(path))


def test_a_plan_without_an_optimizer_has_the_jobs(path: Path, plan: Planner) -> None:
    edit(path, lambda policies: policies.pop("optimizer"))
    assert str(plan(plan=str(path), optim="lion").policies.optimizer.name) == "lion"


def test_the_optimizers_numbers_are_the_jobs(path: Path, plan: Planner) -> None:
    """A plan made with one learning rate must not undo another one on the command line."""
    assert set(yaml.safe_load(path.read_text())["policies"]["optimizer"]) == {
        "name",
        "master",
    }
    used = plan(plan=str(path), learning_rate=0.25, max_grad_norm=0).policies.optimizer
    assert (used.learning_rate, used.max_grad_norm) == (0.25, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.update(chekpointing={}), r"policies: unknown key chekpointing.*checkpointing"),
        (lambda p: p["batch"].update(micro_batch=1), r"policies\.batch.*did you mean micro_batch_"),
        (lambda p: p["batch"].update(xyz=1), r"unknown key xyz; it has micro_batch_size"),
        (lambda p: p["batch"].update(micro_batch_size="two"), r"batch\.micro_batch_size: 'two'"),
        (lambda p: p["batch"].update(micro_batch_size=0), r"at least 1"),
        (lambda p: p["loss"].update(kind="cunked"), r"loss\.kind: 'cunked'"),
        (
            lambda p: p["loss"].update(chunk_tokens=-1),
            r"chunk_tokens and slice_rows .* not -1",
        ),
        (lambda p: p["loss"].update(slice_rows=0), r"chunk_tokens and slice_rows .* 256 and 0"),
        (lambda p: p["loss"].update(slice_rows="few"), r"loss\.slice_rows: 'few'"),
        (lambda p: p["checkpointing"].update(enabled="maybe"), r"checkpointing\.enabled: 'maybe'"),
        (
            lambda p: p["placement"].update(gradients="nvme"),
            r"gradients on nvme with optimizer states on host",
        ),
        (lambda p: p["placement"].update(gradients="moon"), r"placement\.gradients: 'moon'"),
        (lambda p: p["placement"].update(activations="nvme"), r"activations .*not on nvme"),
        (lambda p: p["placement"].update(optimizer_fraction=0), r"optimizer_fraction is 0"),
        (lambda p: p["placement"].update(prefetch="far"), r"placement\.prefetch: 'far'"),
        (lambda p: p["placement"].update(parameters="host", optimizer_fraction=0.5), r"states"),
        (lambda p: p["precision"].update(parameters="fp8"), r"precision\.parameters: 'fp8'.*fp32"),
        (lambda p: p.update(adapter={"rank": 0}), r"adapter\.rank: 0"),
        (lambda p: p.update(adapter={"dropout": 1.5}), r"adapter\.dropout: 1\.5"),
        (lambda p: p.update(adapter={"alpha": -1}), r"adapter\.alpha: -1"),
        (lambda p: p.update(adapter={"targets": "q_proj"}), r"adapter\.targets: 'q_proj'"),
        (lambda p: p.update(batch=3), r"policies\.batch: 3"),
        (lambda p: p.update(optimizer={"learning_rate": 1}), r"set learning_rate.*in the job"),
        (lambda p: p.update(optimizer="adamw"), r"only name and master are read"),
        (lambda p: p["optimizer"].update(name="adamq"), r"optimizer\.name: 'adamq'"),
    ],
)
def test_a_mistake_is_named(path: Path, change: Edit, said: str) -> None:
    edit(path, change)
    with pytest.raises(InputError, match=said) as raised:
        read_policies(path, OptimizerPolicy())
    message = str(raised.value)
    assert message.startswith(f"{path}: policies")
    assert "\n" not in message


def test_the_batch_of_the_job_stays(path: Path, plan: Planner) -> None:
    with pytest.raises(ConfigError, match=r"micro-batch 1 x 2.*train_batch_size: 6"):
        plan(plan=str(path), train_batch_size=6)


@pytest.mark.parametrize(
    ("keys", "change", "said"),
    [
        ({"gradient_checkpointing": "false"}, None, "gradient_checkpointing: false"),
        ({"loss": "full"}, None, "loss: full"),
        ({"offload_optimizer": "none"}, None, "offload_optimizer: none"),
        ({"offload_optimizer_fraction": 0.5}, None, "offload_optimizer_fraction: 0.5"),
        ({"offload_activations": "true"}, None, "offload_activations: true"),
        ({"offload_param": "cpu"}, None, "offload_param: cpu"),
        ({"lazy_step": "true"}, None, "lazy_step: true"),
        ({"precision": "bf16"}, None, "precision: bf16"),
        ({"per_device_train_batch_size": 2}, None, "per_device_train_batch_size: 2"),
        ({"finetuning_type": "lora"}, None, "finetuning_type: lora"),
        ({}, {"rank": 4}, r"allow: \[lora\]"),
        ({"finetuning_type": "lora", "lora_rank": 8}, {"rank": 4}, "lora_rank: 8"),
    ],
)
def test_keys_that_contradict_the_plan_are_named(
    path: Path, plan: Planner, keys: dict[str, Any], change: dict[str, Any] | None, said: str
) -> None:
    """A flag typed beside a plan is never dropped in silence."""
    if change is not None:
        edit(path, lambda policies: policies.update(adapter=change))
    with pytest.raises(ConfigError, match=rf"contradicts the job's .*{said}"):
        plan(plan=str(path), **keys)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"", "no section `policies`"),
        (b"- a list", "no section `policies`"),
        (b"policies: 3", "no section `policies`"),
        (b"policies: {", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "plan.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as raised:
        read_policies(path, OptimizerPolicy())
    assert str(path) in str(raised.value)


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policies(tmp_path, OptimizerPolicy())
