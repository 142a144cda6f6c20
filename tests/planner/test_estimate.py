"""Estimates: the job as it is typed, for the machine that it describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.conftest import WORKLOAD, make_hardware, make_job, make_rates
from transformers import DeepseekV3Config, PretrainedConfig

from tightfit.bill.runtime import likely_link, runtime_bytes
from tightfit.bill.table import Kind
from tightfit.engine.supported import engine_lacks
from tightfit.facts.hardware import Accelerator, Hardware
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner import fitting
from tightfit.planner.estimate import compare_ways, estimate_job
from tightfit.planner.search import plan_job
from tightfit.planner.words import count_techniques
from tightfit.policies import LossKind, Tier
from tightfit.units import GIB, MIB

MakeJob = Callable[..., Job]


def test_it_is_the_job_as_it_is_typed(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    typed = job(memory_limit="1MiB", gradient_checkpointing="true")
    found = estimate_job(typed, config, workload, hardware)
    assert found.limits.missing_bytes(found.bill) > 0
    assert found.policies.checkpointing.enabled
    assert found.policies.loss.kind is LossKind.FULL
    assert count_techniques(found.policies) == 1
    assert Kind.RUNTIME not in found.bill.kinds_at_peak(Tier.DEVICE)


def test_a_job_with_cards_is_priced_for_cards(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    found = estimate_job(job(num_gpus=2), config, workload, hardware)
    assert found.card == (8, 0)
    assert found.policies.precision.parameters == "bf16"
    assert found.limits.device_bytes is None, "nobody knows what its cards have"
    assert found.limits.ranks == 2
    assert any("no card here" in note for note in found.notes)
    link = likely_link((8, 0))
    runtime = runtime_bytes((8, 0), ranks=2, link=link, all_reduces=True).total_bytes
    assert found.bill.kinds_at_peak(Tier.DEVICE)[Kind.RUNTIME] == runtime


def test_a_card_that_is_here_decides(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    turing = Accelerator(0, "a card", 8 * GIB, 7 * GIB, capability=(7, 5))
    found = estimate_job(job(), config, workload, replace(hardware, accelerators=(turing,)))
    assert found.card == (7, 5)
    assert found.policies.precision.parameters == "fp16", "it does not compute in bf16"
    assert found.limits.device_bytes == 7 * GIB
    assert found.notes == ()


def test_ranks_of_one_machine_share_its_host(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    keys = {"offload_optimizer": "cpu", "host_memory_limit": "64MiB", "memory_limit": "none"}
    alone = estimate_job(job(**keys, num_gpus=1), config, workload, hardware)
    four = estimate_job(job(**keys, num_gpus=4, train_batch_size=4), config, workload, hardware)
    tiers = (Tier.HOST, Tier.PINNED)
    one = sum(alone.bill.peak_bytes(tier) for tier in tiers) - 64 * MIB
    each = sum(four.bill.peak_bytes(tier) for tier in tiers)
    assert alone.limits.missing_bytes(alone.bill) == one
    assert four.limits.missing_bytes(four.bill) == 4 * each - 64 * MIB


def test_the_way_that_is_the_job_has_its_bill(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    keys = {"num_gpus": 2, "zero_stage": 2, "offload_optimizer": "cpu", "lazy_step": "false"}
    found = estimate_job(job(**keys), config, workload, hardware)
    ways, refused = compare_ways(found, config, workload)
    rows = {row.name: row for row in ways}
    assert refused == []
    assert {row.policies.sharding.ranks for row in rows.values()} == {2}
    own = rows["ZeRO-2, optimizer on host"]
    assert own.policies == found.policies
    assert own.tightfit.device_bytes == found.bill.peak_bytes(Tier.DEVICE)
    hosts = (Tier.HOST, Tier.PINNED)
    assert own.tightfit.host_bytes == sum(found.bill.peak_bytes(tier) for tier in hosts)
    kinds = dict(found.textbook()[Tier.DEVICE])
    states = sum(kinds.values()) - kinds[Kind.ACTIVATIONS]
    assert own.textbook.device_bytes == states


def test_later_stages_take_no_more(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    found = estimate_job(job(num_gpus=2, precision="bf16"), config, workload, hardware)
    ways, _ = compare_ways(found, config, workload)
    rows = {row.name: row.tightfit.device_bytes for row in ways}
    assert rows["DDP, optimizer on host"] <= rows["DDP"]
    assert rows["ZeRO-3"] <= rows["ZeRO-2"]
    assert rows["ZeRO-3, optimizer on host"] < rows["DDP"]


def test_more_cards_than_are_here_are_told(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    one = replace(
        hardware, accelerators=(Accelerator(0, "a card", 8 * GIB, 7 * GIB, capability=(8, 9)),)
    )
    found = estimate_job(job(num_gpus=2), config, workload, one)
    assert any("has 1 of the 2 cards" in note for note in found.notes)
    assert estimate_job(job(), config, workload, one).notes == ()


def test_a_base_that_is_hardly_packed_is_told(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    """This model is mostly embedding, which stays as it is."""
    found = estimate_job(job(finetuning_type="qlora"), config, workload, hardware)
    assert found.run.quantised > 0
    assert any("are not packed" in note for note in found.notes)


def test_the_textbook_is_that_of_papers(
    config: PretrainedConfig, workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    """16 bytes a parameter, and sbh 34 a layer; 5as/h more with scores, 2 when recomputed."""

    def textbook(**keys: Any) -> tuple[int, int]:
        found = estimate_job(job(precision="bf16", **keys), config, workload, hardware)
        kinds = dict(found.textbook()[Tier.DEVICE])
        return kinds.pop(Kind.ACTIVATIONS), sum(kinds.values())

    values = workload.sequence_length * 2 * config.hidden_size * config.num_hidden_layers
    scores = 5 * config.num_attention_heads * workload.sequence_length / config.hidden_size
    activations, states = textbook()
    found = estimate_job(job(precision="bf16"), config, workload, hardware)
    assert states == 16 * found.run.trainable
    assert activations == 34 * values
    assert textbook(attention="eager")[0] == (34 + scores) * values
    assert textbook(gradient_checkpointing="true")[0] == 2 * values


def test_ways_that_cannot_be_taken_leave_the_others(
    workload: Workload, hardware: Hardware, job: MakeJob
) -> None:
    """Its routers are fp32 whatever the precision, which FSDP2 does not take."""
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, first_k_dense_replace=1, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, pad_token_id=0,
    )  # fmt: skip
    found = estimate_job(job(num_gpus=2), config, workload, hardware)
    ways, refused = compare_ways(found, config, workload)
    assert [row.name for row in ways] == ["DDP", "DDP, optimizer on host"]
    assert len(refused) == 7
    assert "one type for all that is trained" in refused[0]


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"num_gpus": 1, "zero_stage": 3}, "zero_stage 3 shares nothing out"),
        ({"lora_rank": 4}, "lora_rank: no effect on finetuning_type full"),
        ({"memory_limit": "24GB"}, "priced for the CPU of this machine"),
    ],
)
def test_keys_that_do_not_do_what_they_seem_to_are_told(
    config: PretrainedConfig,
    workload: Workload,
    hardware: Hardware,
    job: MakeJob,
    keys: dict[str, Any],
    note: str,
) -> None:
    found = estimate_job(job(**keys), config, workload, hardware)
    assert any(note in said for said in found.notes)


SPLIT = {"optim_master": "split", "precision": "bf16"}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        SPLIT,
        {**SPLIT, "offload_optimizer": "cpu"},
        {**SPLIT, "offload_optimizer": "nvme", "offload_param": "cpu"},
        {"offload_param": "cpu", "offload_prefetch": 0},
        {"offload_optimizer": "cpu", "offload_optimizer_fraction": 0.5, "precision": "bf16"},
    ],
)
def test_an_estimate_is_the_bill_of_the_plan_where_no_technique_is_needed(
    config: PretrainedConfig, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "engine_lacks", engine_lacks)
    job = make_job(nvme_limit="10GiB", **keys)
    found = estimate_job(job, config, WORKLOAD, make_hardware())
    planned = plan_job(job, config, WORKLOAD, make_hardware(), make_rates())
    assert found.policies == planned.policies
    assert found.bill == planned.bill


@pytest.mark.parametrize("num_gpus", [{}, {"num_gpus": 1}])
def test_an_estimate_for_a_card_has_the_lazy_step_that_a_plan_has_there(
    config: PretrainedConfig, num_gpus: dict[str, Any]
) -> None:
    job = make_job(offload_optimizer="cpu", **num_gpus)
    found = estimate_job(job, config, WORKLOAD, make_hardware())
    assert found.policies.placement.lazy_step is bool(num_gpus)


def test_keys_without_effect_are_noted(config: PretrainedConfig) -> None:
    job = make_job(offload_prefetch=3)
    found = estimate_job(job, config, WORKLOAD, make_hardware())
    assert any(note.startswith("offload_prefetch: 3 has no effect") for note in found.notes)
