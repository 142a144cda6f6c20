"""The `textbook` bill: what papers print for model states and activations.

Kept beside the `tightfit` bill because people compare with it. It divides evenly, knows no padding
and nothing that an engine keeps beside its shards; where the two differ, the other one is what a
card needs. Every formula names its source.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import ceil

from tightfit.bill.model_states import INT8_BITS, StateBytes
from tightfit.bill.optimizers import BLOCK_8BIT, EIGHT_BIT, FP32_BYTES, moments
from tightfit.bill.quantised import SCALES_PER_GROUP
from tightfit.bill.shards import ModelTensors
from tightfit.bill.table import Kind
from tightfit.policies import OptimizerName, Policies, QuantisationPolicy, Tier

FP16_BYTES = 2
ADAM_STATE_BYTES = 12  # fp32 master, momentum and variance: K in https://arxiv.org/abs/1910.02054
BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Totals:
    """Parameters of a model by what training does with them; tied ones counted once.

    Attributes:
        trainable: get gradients and optimizer states.
        frozen: get none, kept in the job's precision.
        quantised: get none, stored in few bits.
    """

    trainable: int
    frozen: int = 0
    quantised: int = 0

    @classmethod
    def of(cls, model: ModelTensors) -> Totals:
        """Count the parameters of `model`."""
        return cls(
            model.count(trainable=True),
            model.count(trainable=False),
            model.count(trainable=False, quantised=True),
        )


def zero_bytes_per_parameter(
    stage: int, ranks: int, state_bytes: float = ADAM_STATE_BYTES, width: float = FP16_BYTES
) -> float:
    """Bytes of model states per parameter and rank (https://arxiv.org/abs/1910.02054, section 5).

    In mixed precision with Adam: 16 for stage 0, which is plain data parallelism, 4 + 12/N for 1,
    2 + 14/N for 2 and 16/N for 3.

    Args:
        stage: 0 to 3.
        ranks: N, ranks that the states are shared out over.
        state_bytes: K, bytes of optimizer states and master per parameter.
        width: bytes of a parameter and of a gradient.
    """
    states = state_bytes / (ranks if stage >= 1 else 1)
    gradients = width / (ranks if stage >= 2 else 1)
    parameters = width / (ranks if stage >= 3 else 1)
    return parameters + gradients + states


def optimizer_bytes_per_parameter(name: OptimizerName, *, momentum: bool = False) -> float:
    """Bytes of optimizer states per trainable parameter, without a master.

    8 for Adam, 4 for Lion and for SGD with momentum; with 8-bit states a byte each and an fp32
    scale per block (https://arxiv.org/abs/2110.02861); 0 for Adafactor, whose states grow with rows
    and columns only (https://arxiv.org/abs/1804.04235).
    """
    each = 1 + FP32_BYTES / BLOCK_8BIT if name in EIGHT_BIT else FP32_BYTES
    return moments(name, momentum=momentum) * each


def base_bytes_per_parameter(policy: QuantisationPolicy) -> float:
    """Bytes of one weight of a quantised base and its scales (https://arxiv.org/abs/2305.14314)."""
    return (policy.bits + scale_bits_per_parameter(policy)) / BITS_PER_BYTE


def scale_bits_per_parameter(policy: QuantisationPolicy) -> float:
    """Bits that scales add to a weight (https://arxiv.org/abs/2305.14314, section 3).

    32/64 = 0.5 plain, 8/64 + 32/(64 * 256) = 0.127 doubly quantised. The scales of 8-bit bases go
    by rows and are left out.
    """
    if policy.bits == INT8_BITS:
        return 0.0
    if not policy.double:
        return 32 / policy.block
    return 8 / policy.block + 32 / (policy.block * SCALES_PER_GROUP)


def textbook_state_bytes(
    totals: Totals, policies: Policies, *, momentum: bool = False
) -> StateBytes:
    """Bytes by tier and kind on one rank, ends of a pipeline counted like its middle.

    ZeRO's stages divide over data-parallel ranks (https://arxiv.org/abs/1910.02054), tensor and
    pipeline parallelism divide everything by themselves. What is placed elsewhere is gone from
    the device: with ZeRO-Offload (https://arxiv.org/abs/2101.06840) gradients and optimizer
    states, with ZeRO-Infinity (https://arxiv.org/abs/2104.07857) parameters too. Trainable
    parameters of 16 bits have an fp32 master; adapters are fp32.
    """
    placement, trainable = policies.placement, totals.trainable
    width = policies.precision.parameter_bytes if policies.adapter is None else FP32_BYTES
    states = optimizer_bytes_per_parameter(policies.optimizer.name, momentum=momentum)
    table: dict[Tier, dict[Kind, int]] = defaultdict(dict)
    table[Tier.DEVICE] = {}
    parameters = trainable * width + _base_bytes(totals, policies)
    table[placement.parameters][Kind.PARAMETERS] = _share(parameters, 3, policies)
    table[placement.gradients][Kind.GRADIENTS] = _share(trainable * width, 2, policies)
    where = table[placement.optimizer_states]
    where[Kind.OPTIMIZER_STATES] = _share(trainable * states, 1, policies)
    if width < FP32_BYTES:
        where[Kind.MASTER_WEIGHTS] = _share(trainable * FP32_BYTES, 1, policies)
    return table


def _base_bytes(totals: Totals, policies: Policies) -> float:
    """Bytes of all parameters that are not trained."""
    quantised = base_bytes_per_parameter(policies.quantisation or QuantisationPolicy())
    return totals.frozen * policies.precision.parameter_bytes + totals.quantised * quantised


def _share(count: float, from_stage: int, policies: Policies) -> int:
    """One rank's part of what data-parallel ranks share out from a stage on, rounded up."""
    sharding = policies.sharding
    shards = sharding.shards if sharding.zero_stage >= from_stage else 1
    return ceil(count / (sharding.tensor_parallel * sharding.pipeline_parallel * shards))
