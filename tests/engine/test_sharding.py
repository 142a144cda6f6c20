"""Sharing out changes neither the numbers, nor what the dry run says they cost.

`sharded_runs.py` makes the runs, on real processes; here they are compared.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import sharded_runs as runs
from tests.engine.compared_runs import check_parameters, chosen, is_narrow, made, read, with_more
from transformers import LlamaForCausalLM

from tightfit.bill.table import Kind
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.apply import fit
from tightfit.errors import ConfigError
from tightfit.policies import Policies, ShardingPolicy

CASES = with_more(runs.SHARDING, runs.MORE_SHARDING)
OF_STAGES = [(2, "0"), (2, "1"), (2, "3"), (2, "1 accumulate chunk untied")]
# fp32 sums in another order, and what AdamW makes of it; 16-bit gradients are rounded before sums.
TOLERANCE = {"fp32": (1e-6, 1e-5), "bf16": (2e-3, 2e-2)}  # of norms, relative; of parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where all runs have left their results."""
    return made(tmp_path_factory.mktemp("sharded"), chosen(request, *OF_STAGES))


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_ranks_train_as_one_does(folder: Path, ranks: int, case: str) -> None:
    norm_tolerance, tolerance = TOLERANCE["bf16" if is_narrow(case) else "fp32"]
    alone, expected = read(folder, case, ranks, "alone")
    first, parameters = read(folder, case, ranks, "0")
    assert first["norms"] == pytest.approx(alone["norms"], rel=norm_tolerance, nan_ok=True)
    each = [read(folder, case, ranks, str(rank))[0]["losses"] for rank in range(ranks)]
    for step, (*parts, whole) in enumerate(zip(*each, alone["losses"], strict=True)):
        if step != runs.UNUSUAL:  # one rank's may be infinite, or given up
            assert sum(parts) == pytest.approx(whole, rel=norm_tolerance)
    assert parameters.keys() == expected.keys()
    check_parameters(parameters, expected, tolerance)
    assert math.isnan(first["norms"][runs.UNUSUAL]) == ("inf" in case.split())
    assert any(norm > runs.OPTIMIZER.max_grad_norm for norm in first["norms"]) or "lora" in case


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_all_ranks_agree_to_the_bit(folder: Path, ranks: int, case: str) -> None:
    first, parameters = read(folder, case, ranks, "0")
    for rank in range(1, ranks):
        other, others = read(folder, case, ranks, str(rank))
        assert str(other["norms"]) == str(first["norms"])  # nan is not nan
        assert all(torch.equal(others[name], value) for name, value in parameters.items())


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_the_fake_rank_takes_what_a_real_one_does(folder: Path, ranks: int, case: str) -> None:
    """Byte for byte and kind for kind, at init and in every later step."""
    fake, _ = read(folder, case, ranks, "fake")
    real, _ = read(folder, case, ranks, "0")
    assert real["tables"][""] == fake["tables"][""]
    for step in runs.later_steps():
        assert real["tables"][step] == fake["tables"][str(runs.FAKE_STEPS - 1)]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_no_rank_takes_more_than_the_first(folder: Path, ranks: int, case: str) -> None:
    """Rank 0 has the largest shards, so its bill is enough for all."""
    if case.startswith("0"):
        return  # nothing is shared

    def peak(rank: int, tier: str) -> int:
        found, _ = read(folder, case, ranks, str(rank))
        return max(
            sum(found["tables"][step][phase].get(tier, {}).values())
            for step in runs.later_steps()
            for phase in ("forward", "backward", "step")
        )

    for tier in ("device", "host"):
        assert peak(0, tier) > 0 or tier == "host"
        assert all(peak(rank, tier) <= peak(0, tier) for rank in range(1, ranks))


def kinds_at_peak(folder: Path, case: str, phase: str) -> dict[str, int]:
    found, _ = read(folder, case, 2, "fake")
    kinds: dict[str, int] = found["tables"][str(runs.FAKE_STEPS - 1)][phase]["device"]
    return kinds


def test_what_each_stage_shares(folder: Path) -> None:
    """The table in sharding.py, in numbers. P is of 61 x 16 + 3 layers + 16, all of four bytes."""
    layer = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24 + 2 * 16
    root = 61 * 16 + 16
    whole = 4 * (3 * layer + root)
    padded = 4 * (3 * layer + 62 * 16 + 16)
    step = {stage: kinds_at_peak(folder, str(stage), "step") for stage in (0, 1, 3)}
    assert step[0][Kind.PARAMETERS] == whole
    assert step[0][Kind.GRADIENTS] == whole
    assert step[0].get(Kind.COLLECTIVES, 0) == 0
    for stage in (1, 3):
        assert step[stage][Kind.PARAMETERS] == padded // 2
        assert step[stage][Kind.GRADIENTS] == padded // 2
        states = step[stage][Kind.OPTIMIZER_STATES]
        assert padded <= states < padded + 200  # and a step counter of each parameter
    forward = kinds_at_peak(folder, "1", "forward")
    assert forward[Kind.COLLECTIVES] >= padded
    assert kinds_at_peak(folder, "3", "forward")[Kind.COLLECTIVES] < padded
    assert kinds_at_peak(folder, "1 accumulate chunk untied", "forward")[Kind.GRADIENTS] > padded


def test_as_many_ranks_as_the_policy_says(make_model: Any) -> None:
    policies = Policies(sharding=ShardingPolicy(2, 3))
    with pytest.raises(ConfigError, match="for 2 ranks, and this is a process group of 1"):
        fit(make_model(), policies)
    with fake_ranks(3), pytest.raises(ConfigError, match=r"for 2 ranks.* process group of 3"):
        fit(make_model(), policies)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_shares_with_nobody(make_model: Any, stage: int) -> None:
    engine = fit(make_model(), Policies(sharding=ShardingPolicy(1, stage)))
    assert type(engine.model) is LlamaForCausalLM


def test_replicas_refuse_gradients_that_came_too_late(make_model: Any, make_batch: Any) -> None:
    """They would be added to sums over all ranks, and be summed again."""
    policies = replace(Policies(), sharding=ShardingPolicy(2, 0))
    with fake_ranks(2):
        engine = fit(make_model(), policies)
        ids, labels = make_batch(0)
        engine.backward(engine.loss(ids, labels, 30))
        loss = engine.loss(ids, labels, 30)
        with pytest.raises(ConfigError, match="more micro-batches than accumulation_steps"):
            engine.backward(loss)
        engine.discard_gradients()
        engine.backward(engine.loss(ids, labels, 30))
        assert engine.step() > 0
