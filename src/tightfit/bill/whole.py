"""Which model states ranks keep whole beside their shards. Knows no bytes."""

from __future__ import annotations

from tightfit.policies import Policies


def is_sharded(policies: Policies) -> bool:
    """Whether ranks share model states out."""
    return policies.sharding.shards > 1


def keeps_whole_parameters(policies: Policies) -> bool:
    """Stages 1 and 2 keep them until backward has passed."""
    return is_sharded(policies) and policies.sharding.zero_stage < 3


def keeps_whole_gradients(policies: Policies) -> bool:
    """Stage 1 adds micro-batches up before it reduces."""
    adds_up = policies.sharding.zero_stage == 1 and policies.batch.accumulation_steps > 1
    return is_sharded(policies) and adds_up
