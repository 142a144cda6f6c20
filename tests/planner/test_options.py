"""Which choices a job's keys leave open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.planner.options import Options, Way, options_of, without_technique
from tightfit.planner.words import count_techniques
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PipelineSchedule,
    PlacementPolicy,
    Policies,
    ShardingPolicy,
    Tier,
)

MakeJob = Callable[..., Job]


def options(job: Job, **keys: Any) -> Options:
    return options_of(job, **({"precision": "fp32", "chunked_loss": True} | keys))


def way(found: Options, word: str) -> Way:
    return next(way for way in found.others if way.allow == (word,))


def test_auto_leaves_every_technique_open(job: MakeJob) -> None:
    found = options(job(train_batch_size=6))
    batches = found.batches(found.shardings[0])
    assert [(b.micro_batch_size, b.accumulation_steps) for b in batches] == [
        (6, 1), (3, 2), (2, 3), (1, 6),
    ]  # fmt: skip
    kinds = [LossKind.FULL, LossKind.CHUNKED, LossKind.SLICED]
    assert [loss.kind for loss in found.losses] == kinds
    assert [(c.enabled, c.every) for c in found.checkpointing] == [(False, 1), (True, 2), (True, 1)]
    placements = found.own.placement.all
    candidates = list(found.candidates())
    assert len(candidates) == len(set(candidates)) == 4 * 3 * 3 * len(placements)


@pytest.mark.parametrize(
    ("keys", "stages"),
    [
        ({}, [0]),
        ({"num_gpus": 2}, [0, 1, 2, 3]),
        ({"num_gpus": 2, "nnodes": 2, "zero_stage": 2, "data_parallel_replicas": 1}, [2]),
        ({"num_gpus": 2, "tensor_parallel_size": 2}, [0]),
    ],
)
def test_stages_are_open_where_ranks_share_sequences(
    job: MakeJob, keys: dict[str, Any], stages: list[int]
) -> None:
    found = options(job(train_batch_size=8, **keys))
    assert [sharding.zero_stage for sharding in found.shardings] == stages
    assert {sharding.ranks for sharding in found.shardings} == {
        job(train_batch_size=8, **keys).ranks
    }
    assert {policies.sharding for policies in found.candidates()} == set(found.shardings)
    assert {policies.sharding for policies in found.leanest()} == {found.shardings[-1]}


def test_the_plain_policies_have_no_technique_and_the_leanest_have_all(job: MakeJob) -> None:
    near = {"offload_param": "none", "offload_activations": "false"}
    found = options(job(train_batch_size=4, **near))
    assert count_techniques(found.plain()) == 0
    assert found.plain().batch == BatchPolicy(4, 1)
    lean = found.leanest(way(found, "lora"))
    assert [count_techniques(policies) for policies in lean] == [4, 5] * 2
    assert {policies.batch for policies in lean} == {BatchPolicy(1, 4)}
    assert {p.loss.kind for p in lean} == {LossKind.CHUNKED, LossKind.SLICED}
    assert len(set(lean)) == 4


@pytest.mark.parametrize("loss", ["full", "chunked", "sliced"])
def test_the_leanest_have_the_loss_that_is_asked_for(job: MakeJob, loss: str) -> None:
    found = options(job(loss=loss))
    assert {str(policies.loss.kind) for policies in found.leanest()} == {loss}
    assert len(found.leanest()) == len(found.own.placement.all)


@pytest.mark.parametrize(
    ("keys", "part", "value"),
    [
        ({"loss": "chunked"}, "loss", LossPolicy(LossKind.CHUNKED)),
        ({"loss": "sliced"}, "loss", LossPolicy(LossKind.SLICED)),
        ({"loss": "full"}, "loss", LossPolicy(LossKind.FULL)),
        ({"gradient_checkpointing": True}, "checkpointing", CheckpointingPolicy(True)),
        ({"gradient_checkpointing": "false"}, "checkpointing", CheckpointingPolicy(False)),
        ({"per_device_train_batch_size": 2}, "batch", BatchPolicy(2, 2)),
        ({"gradient_accumulation_steps": 4}, "batch", BatchPolicy(1, 4)),
        ({"finetuning_type": "lora"}, "adapter", AdapterPolicy(8, 16.0, 0.0, ())),
        (
            {"num_gpus": 4, "tensor_parallel_size": 2, "zero_stage": 1},
            "sharding",
            ShardingPolicy(4, 1, tensor_parallel=2),
        ),
        (
            {"num_gpus": 4, "data_parallel_replicas": 2, "zero_stage": 3},
            "sharding",
            ShardingPolicy(4, 3, replicas=2),
        ),
        (
            {"num_gpus": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
            "sharding",
            ShardingPolicy(2, 0, 1, 2, 1, PipelineSchedule.INTERLEAVED, virtual_stages=2),
        ),
    ],
)
def test_a_key_that_is_set_is_in_every_candidate(
    job: MakeJob, keys: dict[str, Any], part: str, value: object
) -> None:
    found = {
        getattr(policies, part)
        for policies in options(job(train_batch_size=4, **keys)).candidates()
    }
    assert found == {value}


def test_micro_batch_and_accumulation_make_the_global_batch(job: MakeJob) -> None:
    found = options(
        job(train_batch_size="auto", per_device_train_batch_size=3, gradient_accumulation_steps=5)
    )
    assert found.batches(found.shardings[0]) == (BatchPolicy(3, 5),)


def test_precision_auto_is_what_the_device_says(job: MakeJob) -> None:
    assert options(job(), precision="bf16").own.fixed.precision.parameters == "bf16"
    fixed = options(job(precision="fp32"), precision="bf16").own.fixed
    assert fixed.precision.parameters == "fp32"


def test_the_numbers_of_optimizer_and_adapter_come_from_the_job(job: MakeJob) -> None:
    found = options(
        job(
            learning_rate=0.25, weight_decay=0.5, adam_beta1=0.1, adam_beta2=0.2,
            adam_epsilon=0.125, max_grad_norm=3, finetuning_type="lora", lora_rank=4,
            lora_dropout=0.5, lora_target="q_proj, v_proj,", use_rslora=True,
        )
    ).own.fixed  # fmt: skip
    optimizer = found.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (0.25, 0.5)
    assert (optimizer.betas, optimizer.epsilon) == ((0.1, 0.2), 0.125)
    assert optimizer.max_grad_norm == 3
    assert found.adapter == AdapterPolicy(4, 8.0, 0.5, ("q_proj", "v_proj"), rslora=True)
    adapter = way(options(job(lora_alpha=5)), "lora").fixed.adapter
    assert adapter is not None
    assert adapter.alpha == 5


def test_a_model_without_chunked_loss(job: MakeJob) -> None:
    assert options(job(), chunked_loss=False).losses == (LossPolicy(LossKind.FULL),)
    for loss in ("chunked", "sliced"):
        with pytest.raises(ConfigError, match=f"loss: {loss} does not work.*loss: full"):
            options(job(loss=loss), chunked_loss=False)


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ({}, []),
        ({"allow": ["lora"]}, ["lora"]),
        ({"allow": ["qlora", "8bit-optimizer"]}, ["8bit-optimizer", "qlora"]),
        ({"allow": ["lora"], "finetuning_type": "lora"}, []),
        ({"allow": ["8bit-optimizer", "lora"], "optim": "sgd"}, ["lora"]),
        ({"allow": ["split-master"]}, []),  # in fp32 nothing is split
    ],
)
def test_what_changes_numbers_is_a_fall_back_only_where_it_is_allowed(
    job: MakeJob, keys: dict[str, Any], allowed: list[str]
) -> None:
    """In the order in which they are tried: what changes least first."""
    found = options(job(**keys))
    assert [word for way in found.allowed for word in way.allow] == allowed
    wanted = keys.get("finetuning_type") == "lora"
    assert all((p.adapter is not None) is wanted for p in found.candidates())


def test_optimizers_that_are_allowed_are_combined(job: MakeJob) -> None:
    found = options(job(allow=["split-master", "8bit-optimizer"]), precision="bf16")
    states = [(w.fixed.optimizer.name, w.fixed.optimizer.master) for w in found.allowed]
    assert states == [("adamw", "split"), ("adamw_8bit", "fp32"), ("adamw_8bit", "split")]
    assert all(found.way_of(next(found.candidates(way))) == way for way in found.allowed)


def test_without_technique_takes_away_one_at_a_time() -> None:
    everything = Policies(
        batch=BatchPolicy(2, 3),
        loss=LossPolicy(LossKind.CHUNKED),
        checkpointing=CheckpointingPolicy(True),
        placement=PlacementPolicy(Tier.HOST, Tier.HOST),
        adapter=AdapterPolicy(),
    )
    found = dict(without_technique(everything))
    assert len(found) == count_techniques(everything) == 5
    assert {count_techniques(policies) for policies in found.values()} == {4}
    assert {policies.global_batch_size for policies in found.values()} == {6}
    assert list(without_technique(Policies())) == []


def test_without_zero_replicas_of_shards_are_plain_ones() -> None:
    sharing = Policies(sharding=ShardingPolicy(4, 3, replicas=2))
    assert dict(without_technique(sharing)) == {
        "ZeRO-3": replace(sharing, sharding=ShardingPolicy(4, 0))
    }


def test_a_split_master_is_for_bf16_whoever_chose_it(job: MakeJob) -> None:
    asked = job(optim_master="split")
    assert options(asked, precision="bf16").plain().optimizer.split_master
    assert not options(job(), precision="bf16").plain().optimizer.split_master
    with pytest.raises(ConfigError, match=r"optim_master: split.*auto is fp32 here"):
        options(asked, precision="fp32")


def test_adapters_that_are_fallen_back_on_have_no_master_to_split(job: MakeJob) -> None:
    found = options(job(optim_master="split", allow=["lora"]), precision="bf16")
    candidates = list(found.candidates(way(found, "lora")))
    assert candidates
    assert not any(policies.optimizer.split_master for policies in candidates)
