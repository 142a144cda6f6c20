"""The closed forms beside what torch's `fully_shard` allocates on ranks of uneven shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.bill.model_states import tensor_state_bytes
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.policies import Policies, ShardingPolicy, Tier

PROGRAM = Path(__file__).parent / "count_fsdp_shards.py"
CASES = ["2,0,2", "2,0,3", "3,0,2", "3,2,3", "5,0,3", "5,4,2"]  # ranks, rank, stage


@pytest.fixture(scope="module")
def fsdp_runs() -> dict[str, dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, str(PROGRAM), *CASES], capture_output=True, text=True, check=True
    )
    return dict(zip(CASES, json.loads(result.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_shards_are_those_of_torch(fsdp_runs: dict[str, dict[str, Any]], case: str) -> None:
    ranks, rank, stage = map(int, case.split(","))
    run = fsdp_runs[case]
    model = ModelTensors.grouped(
        (name, Tensor(tuple(shape), trainable=trainable)) for name, shape, trainable in run["named"]
    )
    policies = Policies(sharding=ShardingPolicy(ranks, stage))
    table = tensor_state_bytes(model, policies, resident_layers=1)[Tier.DEVICE]
    assert table[Kind.PARAMETERS] == run["parameters"]
    assert table[Kind.GRADIENTS] == run["gradients"]
    if rank == 0:
        assert table[Kind.OPTIMIZER_STATES] == run["optimizer states"]
    else:  # the last ranks have fewer rows, and states have no padding
        assert table[Kind.OPTIMIZER_STATES] > run["optimizer states"]
    passing = [t.total_elements for t in (*model.root, *model.layers[0]) if t.trainable]
    assert table[Kind.COLLECTIVES] == run["whole"] + 4 * sum(passing)
