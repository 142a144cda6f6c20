"""The Python API, used as a person with a training loop of their own would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import tightfit
from tightfit.errors import ConfigError
from tightfit.planner import prepared
from tightfit.planner.rates import Rates
from tightfit.policies import LossKind, Tier

WORKLOAD = tightfit.Workload(sequence_length=32, global_batch_size=4)
Load = Callable[..., PreTrainedModel]


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(
        **{
            field.name: 1e-6 if field.name.endswith("operation_seconds") else 1e10
            for field in dataclasses.fields(Rates)
            if field.type == "float"
        }
    )
    monkeypatch.setattr(prepared, "measure_rates", lambda device, dtype: rates)


@pytest.fixture
def load(tiny_model_folder: Path) -> Load:
    def load(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=dtype)
        assert isinstance(model, LlamaForCausalLM)
        return model

    return load


def batches(steps: int) -> list[torch.Tensor]:
    """The same `[4, 32]` again and again, so that the loss must fall."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (4, 32), generator=generator)] * steps


def own_loop(engine: Any, plan: tightfit.Plan, steps: int) -> list[float]:
    """The loop of docs/python.md: the model is called as ever, the engine does the rest."""
    split = plan.policies.batch
    losses = []
    for batch in batches(steps):
        total = 0.0
        for ids in batch.split(split.micro_batch_size):
            loss = engine.model(input_ids=ids, labels=ids).loss / split.accumulation_steps
            engine.backward(loss)
            total += float(loss.detach())
        engine.step()
        losses.append(total)
    return losses


TIGHT = {
    "gradient_checkpointing": "true", "loss": "chunked", "offload_optimizer": "cpu",
    "per_device_train_batch_size": 1,
}  # fmt: skip


def test_a_loop_of_ones_own_trains_the_same_inside_a_tight_plan(load: Load) -> None:
    """To 1e-4 after six steps: only the order of summation differs. And like torch's AdamW."""
    losses = []
    for keys in ({}, TIGHT):
        model = load()
        plan = tightfit.plan(model, workload=WORKLOAD, learning_rate=1e-3, **keys)
        engine = tightfit.fit(model, plan)
        losses.append(own_loop(engine, plan, 6))
    plain, tight = losses
    assert tight == pytest.approx(plain, abs=1e-4)
    assert plain[-1] < plain[0] - 0.05
    assert by_hand(load(), 6) == pytest.approx(plain, abs=1e-4)


def by_hand(model: PreTrainedModel, steps: int) -> list[float]:
    """The same without tightfit."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for ids in batches(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_the_plan_holds_what_it_promises(load: Load) -> None:
    """A ledger that enforces the predicted peak lets the loop through."""
    model = load()
    plan = tightfit.plan(model, workload=WORKLOAD, **TIGHT)
    limit = plan.bill.peak_bytes(Tier.DEVICE)
    with tightfit.Ledger(limits={Tier.DEVICE: limit}) as ledger:
        ledger.adopt(model)
        own_loop(tightfit.fit(model, plan), plan, 2)
    assert ledger.peak_bytes(Tier.DEVICE) <= limit


def test_planning_by_name_and_by_folder(tiny_model_folder: Path, load: Load) -> None:
    by_folder = tightfit.plan(str(tiny_model_folder), workload=WORKLOAD)
    by_model = tightfit.plan(load(), workload=WORKLOAD)
    assert by_folder.bill == by_model.bill
    assert by_folder.fits


def test_the_hardware_given_is_the_one_planned_for(load: Load) -> None:
    from tightfit.planner.machine import usable_hardware

    here = usable_hardware(Path())
    small = dataclasses.replace(here, ram_available_bytes=2**30)
    plan = tightfit.plan(load(), workload=WORKLOAD, hardware=small, **TIGHT)
    assert plan.limits.shared_bytes == 2**30


def test_keys_are_those_of_a_job(load: Load) -> None:
    plan = tightfit.plan(
        load(), workload=WORKLOAD, memory_limit="64MiB", loss="chunked", learning_rate=0.5
    )
    assert plan.limits.device_bytes == 64 * 2**20
    assert plan.policies.loss.kind is LossKind.CHUNKED
    assert plan.policies.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"learning_rte": 1},
            r"^learning_rte is not a key of a job; did you mean learning_rate\?$",
        ),
        ({"xyzzy": 1}, r"^xyzzy is not a key of a job; docs/config\.md"),
        (
            {"learning_rate": -1},
            r"^learning_rate: -1 is not accepted; it must be a number above 0$",
        ),
        (
            {"offload_activations": "maybe"},
            r"^offload_activations: 'maybe' is not .* true \| false$",
        ),
        ({"offload_prefetch": 65}, r"^offload_prefetch: 65 is not accepted; it must be .* 0 to 64"),
        ({"cutoff_len": None}, r"^cutoff_len: None is not accepted; it must be a whole number"),
        ({"seed": True}, r"^seed: true is not accepted; it must be a whole number"),
        ({"allow": ["all"]}, r"^allow: \['all'\] is not accepted; it must be .*\| lora \| qlora$"),
        ({"memory_limit": "much"}, r"^memory_limit: 'much' is not a size"),
        ({"train_batch_size": 8}, r"train_batch_size 8 contradicts .*global_batch_size 4"),
        ({"per_device_train_batch_size": 3}, r"4 is not a multiple of .* 3"),
        ({"lora_target": "wq", "finetuning_type": "lora"}, r"lora_target wq"),
    ],
)
def test_wrong_keys(load: Load, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        tightfit.plan(load(), workload=WORKLOAD, **keys)
    assert "\n" not in str(raised.value)


def test_all_that_is_wrong_is_said_at_once(load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        tightfit.plan(load(), workload=WORKLOAD, seed=-1, optim="adam")
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["optim", "seed"]
    assert "pydantic" not in str(raised.value)


ON_DISK = {"offload_optimizer": "nvme", "offload_param": "none", "offload_activations": "false"}


def test_the_folder_that_was_planned_for_is_the_one_that_is_used(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "fast"
    model = load()
    plan = tightfit.plan(model, workload=WORKLOAD, offload_folder=str(folder), **ON_DISK)
    assert plan.offload_folder == folder
    assert plan.policies.placement.optimizer_states is Tier.NVME
    engine = tightfit.fit(model, plan)
    assert folder.is_dir()
    assert len(own_loop(engine, plan, 1)) == 1
    other = tmp_path / "other"
    tightfit.fit(load(), plan, offload_folder=other)
    assert other.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"fast", "other"}
    assert tightfit.plan(model, workload=WORKLOAD).offload_folder is None


def test_a_folder_in_memory_is_refused(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    plan = tightfit.plan(model, workload=WORKLOAD, offload_folder=str(tmp_path), **ON_DISK)
    monkeypatch.setattr("tightfit.facts.disk.why_no_disk", lambda folder: "it is a drawing")
    with pytest.raises(ConfigError, match=r"^offload_folder .*it is a drawing"):
        tightfit.fit(model, plan)
    with pytest.raises(ConfigError, match=r"^offload_folder .*it is a drawing"):
        tightfit.plan(model, workload=WORKLOAD, offload_folder=str(tmp_path))


def test_a_model_of_another_precision_than_the_plans(load: Load) -> None:
    plan = tightfit.plan(load(), workload=WORKLOAD)
    with pytest.raises(ConfigError, match="plan is for fp32 parameters, the model has bf16"):
        tightfit.fit(load(torch.bfloat16), plan)
    half = load(torch.float16)
    plan = tightfit.plan(half, workload=WORKLOAD)
    assert tightfit.fit(half, plan).loss_scale is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        tightfit.fitt  # noqa: B018
    for name in tightfit.__all__:
        assert getattr(tightfit, name) is not None
