"""Closed forms of the model states: parameters, gradients, master weights, optimizer states.

The `tightfit` bill for one rank, from a count of parameters alone. Frozen parameters have no
gradients and no states; tied weights are counted once by whoever counts. Activations have no
closed form here: the dry run counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tightfit.bill.table import Kind
from tightfit.policies import Policies, Tier

FP32_BYTES = 4
ADAMW_MOMENTS = 2  # Kingma & Ba, https://arxiv.org/abs/1412.6980: first and second moment


def model_state_bytes(
    trainable: int, frozen: int, policies: Policies
) -> Mapping[Tier, Mapping[Kind, int]]:
    """Bytes by tier and kind with every gradient present, the worst moment of a step.

    Args:
        trainable: number of parameters that get gradients.
        frozen: number of parameters that do not.
        policies: precision and placement are read.

    A gradient has its parameter's type; adapters are fp32 on a base of any type, as peft makes
    them. An fp32 master exists where the update cannot run on the parameter itself: it is 16 bits
    wide, or the update runs on another tier.
    """
    base_width = policies.precision.parameter_bytes
    width = base_width if policies.adapter is None else FP32_BYTES
    states = policies.placement.optimizer_states
    has_master = states is not Tier.DEVICE or width < FP32_BYTES
    table: dict[Tier, dict[Kind, int]] = defaultdict(dict)
    table[Tier.DEVICE][Kind.PARAMETERS] = trainable * width + frozen * base_width
    table[policies.placement.gradients][Kind.GRADIENTS] = trainable * width
    table[states][Kind.OPTIMIZER_STATES] = trainable * ADAMW_MOMENTS * FP32_BYTES
    if has_master:
        table[states][Kind.MASTER_WEIGHTS] = trainable * FP32_BYTES
    return table
