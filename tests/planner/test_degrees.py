"""Which divisions of a job's ranks are open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tightfit.errors import UnsupportedError
from tightfit.facts.job import Job
from tightfit.planner.degrees import leanest, shardings_of
from tightfit.policies import ShardingPolicy

MakeJob = Callable[..., Job]
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}


def sizes(found: tuple[ShardingPolicy, ...]) -> set[tuple[int, int]]:
    return {(s.tensor_parallel, s.pipeline_parallel) for s in found}


def test_one_card_is_not_divided(job: MakeJob) -> None:
    assert shardings_of(job(), LLAMA) == (ShardingPolicy(),)


def test_the_plainest_comes_first_and_each_once(job: MakeJob) -> None:
    found = shardings_of(job(num_gpus=8, train_batch_size=8), LLAMA)
    assert found[0] == ShardingPolicy(8)
    assert len(found) == len(set(found))
    assert sizes(found) == {(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8}


@pytest.mark.parametrize(
    ("config", "open_sizes"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}, {1, 3}),
        ({"num_attention_heads": 32, "num_key_value_heads": 2, "num_hidden_layers": 4}, {1, 2}),
        ({}, {1}),
    ],
)
def test_tensor_groups_divide_the_heads(
    job: MakeJob, config: dict[str, int], open_sizes: set[int]
) -> None:
    found = shardings_of(job(num_gpus=6, train_batch_size=6), config)
    assert {s.tensor_parallel for s in found} == open_sizes


def test_tensor_groups_stay_inside_a_machine(job: MakeJob) -> None:
    found = shardings_of(job(num_gpus=2, nnodes=4, train_batch_size=8), LLAMA)
    assert {s.tensor_parallel for s in found} == {1, 2}
    assert {s.pipeline_parallel for s in found} == {1, 2, 4, 8}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_that_is_asked_for_shares_something_out(job: MakeJob, stage: int) -> None:
    """Two stages of a pipeline on two ranks are no answer to ZeRO-3."""
    found = shardings_of(job(num_gpus=2, train_batch_size=2, zero_stage=stage), LLAMA)
    assert sizes(found) == {(1, 1)}
    whole = {"tensor_parallel_size": 2, "zero_stage": stage}
    assert sizes(shardings_of(job(num_gpus=2, train_batch_size=2, **whole), LLAMA)) == {(2, 1)}


def test_no_stage_is_without_a_layer(job: MakeJob) -> None:
    found = shardings_of(job(num_gpus=8, train_batch_size=8), {"num_hidden_layers": 3})
    assert {s.pipeline_parallel for s in found} == {1, 2}


def test_replicas_are_whole_machines(job: MakeJob) -> None:
    found = shardings_of(job(num_gpus=2, nnodes=4, train_batch_size=8), LLAMA)
    plain = {s.replicas for s in found if sizes((s,)) == {(1, 1)}}
    assert plain == {1, 2, 4}
    assert {s.zero_stage for s in found if s.replicas > 1} == {1, 2, 3}


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel", 2),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel", 4),
        ({"data_parallel_replicas": 2}, "replicas", 2),
        ({"zero_stage": 2}, "zero_stage", 2),
        (
            {"pipeline_parallel_size": 4, "pipeline_layers": [7, 8, 8, 9]},
            "stage_layers",
            (7, 8, 8, 9),
        ),
    ],
)
def test_a_size_that_is_named_stays(
    job: MakeJob, keys: dict[str, Any], field: str, value: int
) -> None:
    found = shardings_of(job(num_gpus=8, train_batch_size=8, **keys), LLAMA)
    assert {getattr(sharding, field) for sharding in found} == {value}


def test_stages_are_not_given_other_layers_than_there_are(job: MakeJob) -> None:
    keys = {"num_gpus": 2, "pipeline_parallel_size": 2, "pipeline_layers": [16, 15]}
    with pytest.raises(UnsupportedError, match=r"16 \+ 15 = 31, and the model has 32 layers"):
        shardings_of(job(**keys), LLAMA)


def test_the_leanest_share_everything_out(job: MakeJob) -> None:
    """With matrices and layers divided not at all and as far as they go: which is leaner is a
    matter of the model."""
    found = leanest(shardings_of(job(num_gpus=4, train_batch_size=4), LLAMA))
    assert {(s.tensor_parallel, s.pipeline_parallel, s.zero_stage) for s in found} == {
        (1, 1, 3), (4, 1, 0), (1, 4, 0),
    }  # fmt: skip
