"""Bytes that data-parallel ranks send each other in one optimizer step.

Counts only, of `engine/sharding.py`'s stages over ring algorithms, in which each of n ranks sends
(n - 1) / n of what is gathered or scattered, and twice that of what is summed on all
(https://doi.org/10.1016/j.jpdc.2008.09.002; for ZeRO https://arxiv.org/abs/1910.02054, section 7).
"""

from __future__ import annotations

from tightfit.policies import Policies


def sent_bytes(parameters: int, trainable: int, policies: Policies) -> float:
    """What one rank sends.

    Args:
        parameters: of the whole model, frozen ones too.
        trainable: parameters with gradients.
    """
    sharding, width = policies.sharding, policies.precision.parameter_bytes
    ranks, batches = sharding.data_parallel, policies.batch.accumulation_steps
    # Stage 1 keeps what it has gathered, and gradients, to the last micro-batch; stage 3 gathers
    # again in backward.
    gathers = (0, 1, batches, 2 * batches)[sharding.zero_stage]
    scatters = (2, 1, batches, batches)[sharding.zero_stage]
    return (ranks - 1) / ranks * width * (gathers * parameters + scatters * trainable)
