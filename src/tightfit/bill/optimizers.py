"""Bytes of an optimizer's states for one parameter, from its shape.

The master copy of a 16-bit parameter is not among them: `model_states` counts it. Knows nothing
of ranks or tiers; where a tensor is sharded, ask with the shape of the shard.
"""

from __future__ import annotations

from math import prod

from tightfit.bill.shards import ceil_divide
from tightfit.policies import OptimizerName

FP32_BYTES = 4
BLOCK_8BIT = 256  # values per fp32 scale in bitsandbytes' 8-bit optimizers, and in ours
MIN_8BIT_VALUES = 4096  # bitsandbytes keeps smaller tensors in fp32

# Tensors of the parameter's own shape: AdamW https://arxiv.org/abs/1412.6980, Lion
# https://arxiv.org/abs/2302.06675. Adafactor's have other shapes.
_MOMENTS = {
    OptimizerName.ADAMW: 2,
    OptimizerName.ADAMW_8BIT: 2,
    OptimizerName.ADAMW_COMPACT: 2,
    OptimizerName.LION: 1,
    OptimizerName.LION_8BIT: 1,
    OptimizerName.SGD: 0,
}
EIGHT_BIT = (OptimizerName.ADAMW_8BIT, OptimizerName.LION_8BIT, OptimizerName.ADAMW_COMPACT)
# These correct or decay by the number of steps, an fp32 scalar per parameter.
_COUNTING = (
    OptimizerName.ADAMW,
    OptimizerName.ADAMW_8BIT,
    OptimizerName.ADAMW_COMPACT,
    OptimizerName.ADAFACTOR,
)


def moments(name: OptimizerName, *, momentum: bool = False) -> int:
    """Values that an optimizer keeps per parameter; 0 for Adafactor, which keeps fewer than one.

    Args:
        name: the optimizer.
        momentum: SGD has one. Others are not asked.
    """
    if name is OptimizerName.SGD and momentum:
        return 1
    return _MOMENTS.get(name, 0)


def moment_bytes(shape: tuple[int, ...], name: OptimizerName, *, momentum: bool = False) -> int:
    """Bytes of the states of one parameter of `shape`, without its step counter."""
    if name is OptimizerName.ADAFACTOR:
        return FP32_BYTES * _factored_values(shape)
    values = prod(shape)
    each = _block_wise_bytes(values) if name in EIGHT_BIT else FP32_BYTES * values
    return moments(name, momentum=momentum) * each


def moment_widths(values: int, name: OptimizerName) -> tuple[tuple[int, ...], int]:
    """Bytes per value of each moment of a parameter of so many values, and how many of them have
    scales; none of Adafactor, whose states do not go by value."""
    eight_bit = name in EIGHT_BIT and values >= MIN_8BIT_VALUES
    count = moments(name)
    return (1 if eight_bit else FP32_BYTES,) * count, count if eight_bit else 0


def counter_bytes(name: OptimizerName) -> int:
    """Bytes of one parameter's step counter."""
    return FP32_BYTES if name in _COUNTING else 0


def _block_wise_bytes(values: int) -> int:
    """8-bit values with an fp32 scale per block (https://arxiv.org/abs/2110.02861).

    Block and threshold are those of bitsandbytes 0.50, `optim/optimizer.py`. Its two tables of
    256 fp32 values, shared by all tensors, are not counted.
    """
    if values < MIN_8BIT_VALUES:
        return FP32_BYTES * values
    return values + FP32_BYTES * ceil_divide(values, BLOCK_8BIT)


def _factored_values(shape: tuple[int, ...]) -> int:
    """Adafactor (https://arxiv.org/abs/1804.04235) without first moment, its default.

    A row and a column per matrix in place of the second moment; vectors keep it whole.
    """
    values = prod(shape)
    if len(shape) < 2 or values == 0:
        return values
    return values // shape[-1] + values // shape[-2]
