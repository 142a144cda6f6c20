"""Of every other kind of plan the fastest is shown with its time, at the price of no dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.planner.conftest import WORKLOAD, make_hardware, make_job
from transformers import PretrainedConfig

import tightfit.planner.pricing
from tightfit.dry_run import DryRun
from tightfit.facts.workload import Workload
from tightfit.planner.fitting import possible
from tightfit.planner.options import options_of
from tightfit.planner.plan import Plan, Slower
from tightfit.planner.pricing import Pricing
from tightfit.planner.search import plan_job
from tightfit.planner.slower import compared, sharing_out
from tightfit.policies import LossKind, Policies, ShardingPolicy, Tier

Planner = Callable[..., Plan]
HAS: dict[str, Callable[[Policies], bool]] = {
    "accumulation": lambda p: p.batch.accumulation_steps > 1,
    "chunked loss": lambda p: p.loss.kind is LossKind.CHUNKED,
    "sliced loss": lambda p: p.loss.kind is LossKind.SLICED,
    "gradient checkpointing": lambda p: p.checkpointing.enabled,
    "optimizer states on host": lambda p: p.placement.optimizer_states is Tier.HOST,
}


def by_kind(chosen: Plan) -> dict[str, Slower]:
    found = {one.kind: one for one in chosen.slower}
    assert len(found) == len(chosen.slower)
    return found


def test_each_technique_that_is_not_used_has_its_fastest_plan(
    plan: Planner, pricing: Pricing
) -> None:
    chosen = plan(memory_limit="1GiB")
    found = by_kind(chosen)
    assert found.keys() == HAS.keys()
    options = options_of(make_job(), precision="fp32", chunked_loss=True)
    candidates = [policies for policies in options.candidates() if possible(policies)]
    for kind, has in HAS.items():
        seconds = [pricing.step_time(p).total for p in candidates if has(p)]
        assert found[kind].seconds == pytest.approx(max(min(seconds), chosen.step_time.total))
        assert found[kind].verdict.startswith(("slower: ", "no faster: "))
        assert has(found[kind].policies or Policies())


@pytest.mark.parametrize("rank", [0, 8, 14])
def test_none_is_faster_nor_was_turned_down(plan: Planner, peaks: list[int], rank: int) -> None:
    chosen = plan(memory_limit=peaks[rank])
    down = {candidate.policies for candidate in chosen.alternatives}
    for one in chosen.slower:
        assert one.seconds is not None
        assert one.seconds >= chosen.step_time.total
        assert one.policies not in down
        assert not HAS[one.kind](chosen.policies)


RANKS = {
    "num_gpus": 2, "train_batch_size": 4, "loss": "full", "gradient_checkpointing": "false",
    "offload_optimizer": "none", "offload_param": "none", "offload_activations": "false",
    "per_device_train_batch_size": 1,
}  # fmt: skip


def test_each_other_way_to_share_out_is_there(plan: Planner, pricing: Pricing) -> None:
    chosen = plan(workload=Workload(128, 4), **RANKS)
    names = {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel", "pipeline"}
    found = by_kind(chosen)
    assert found.keys() >= names - {sharing_out(chosen.policies.sharding)}
    assert len(found) >= 5
    for name, one in found.items():
        if name != "accumulation":
            assert one.policies is not None
            assert sharing_out(one.policies.sharding) == name


@pytest.mark.parametrize(
    ("sharding", "name"),
    [
        (ShardingPolicy(), "one card"),
        (ShardingPolicy(2), "data parallel"),
        (ShardingPolicy(2, 3), "ZeRO-3"),
        (ShardingPolicy(4, 3, replicas=2), "replicas of shards"),
        (ShardingPolicy(4, 1, tensor_parallel=2), "tensor parallel"),
        (
            ShardingPolicy(4, tensor_parallel=2, pipeline_parallel=2),
            "tensor parallel with pipeline",
        ),
    ],
)
def test_ways_to_share_out_have_names(sharding: ShardingPolicy, name: str) -> None:
    assert sharing_out(sharding) == name


def test_one_card_takes_as_long_as_its_own_plan(config: PretrainedConfig) -> None:
    """The global batch is the same, and the host is its own."""
    keys: dict[str, Any] = {"ram": "64GiB", "offload_optimizer": "cpu"}
    hardware = make_hardware()
    two = plan_job(make_job(gpu="2xrtx-4090", **keys), config, WORKLOAD, hardware)
    one = plan_job(make_job(gpu="rtx-4090", **keys), config, WORKLOAD, hardware)
    found = by_kind(two).get("one card")
    assert found is not None
    assert found.seconds == pytest.approx(one.step_time.total, rel=0.05)
    assert found.verdict == compared(found.seconds or 0, two.step_time.total)
    assert by_kind(one).keys().isdisjoint({"one card", "data parallel"})


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (5.2, "slower: 5.2 s, this plan 3.1 s"),
        (2.0, "faster, if it fits: 2.0 s, this plan 3.1 s"),
        (3.11, "no faster: 3.1 s"),
    ],
)
def test_two_times_are_compared_as_they_are_shown(own: float, said: str) -> None:
    assert compared(own, 3.1) == said


def test_what_is_allowed_and_not_needed_is_there_without_a_dry_run(
    plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = tightfit.planner.pricing.dry_run
    runs: list[Policies] = []

    def run(
        config: PretrainedConfig, policies: Policies, workload: Workload, **options: Any
    ) -> DryRun:
        runs.append(policies)
        return honest(config, policies, workload, **options)

    monkeypatch.setattr(tightfit.planner.pricing, "dry_run", run)
    chosen = plan(memory_limit="1GiB", allow=["8bit-optimizer", "lora"])
    found = by_kind(chosen)
    assert found["8-bit optimizer states"].seconds is not None
    assert found["LoRA"].policies is None
    for name in ("8-bit optimizer states", "LoRA"):
        assert "changes the numbers" in found[name].verdict
    assert set(runs) == {chosen.policies}
    assert {one["kind"] for one in listed(chosen)} == found.keys()


def listed(chosen: Plan) -> list[dict[str, Any]]:
    said = chosen.to_json()["slower"]
    assert isinstance(said, list)
    return said
