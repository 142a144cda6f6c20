"""Bytes between ranks, by the stages' definitions."""

from __future__ import annotations

import pytest

from tightfit.planner.collectives import sent_bytes
from tightfit.policies import BatchPolicy, Policies, PrecisionPolicy, ShardingPolicy

PARAMETERS, TRAINABLE = 1000, 600


@pytest.mark.parametrize(
    ("stage", "accumulation", "times_parameters", "times_trainable"),
    [
        (0, 1, 0, 2), (0, 4, 0, 2),  # one sum on all ranks
        (1, 1, 1, 1), (1, 4, 1, 1),  # gathered and scattered once
        (2, 1, 1, 1), (2, 4, 4, 4),  # in each micro-batch
        (3, 1, 2, 1), (3, 4, 8, 4),  # gathered in backward too
    ],
)  # fmt: skip
@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_sent_bytes(
    stage: int,
    accumulation: int,
    times_parameters: int,
    times_trainable: int,
    precision: str,
    width: int,
    ranks: int,
) -> None:
    policies = Policies(
        batch=BatchPolicy(1, accumulation),
        precision=PrecisionPolicy(precision),
        sharding=ShardingPolicy(ranks, stage),
    )
    whole = times_parameters * PARAMETERS + times_trainable * TRAINABLE
    expected = width * whole * (ranks - 1) / ranks
    assert sent_bytes(PARAMETERS, TRAINABLE, policies) == pytest.approx(expected)


def test_one_rank_sends_nothing() -> None:
    assert sent_bytes(PARAMETERS, TRAINABLE, Policies()) == 0
