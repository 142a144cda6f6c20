"""The shape of the work that a job describes before its data was looked at."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.facts.job import Job
from tightfit.facts.workload import Workload, planned_workload


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"cutoff_len": 64}, Workload(64, 1, max_new_tokens=32)),
        (
            {"cutoff_len": 64, "train_batch_size": 6, "val_size": 0.1},
            Workload(64, 6, evaluation_sequence_length=64, max_new_tokens=32),
        ),
        (
            {"cutoff_len": 64, "sample_prompt": "Why?", "max_new_tokens": 10},
            Workload(64, 1, prompt_length=54, max_new_tokens=10),
        ),
        (
            {"cutoff_len": 8, "sample_prompt": "Why?", "per_device_eval_batch_size": 3},
            Workload(8, 1, evaluation_batch_size=3, prompt_length=1, max_new_tokens=32),
        ),
    ],
)
def test_what_was_not_looked_at_is_as_long_as_allowed(
    keys: dict[str, Any], expected: Workload
) -> None:
    assert planned_workload(Job(model_name_or_path="m", **keys)) == expected
