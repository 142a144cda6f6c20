"""Closed form of a 4-bit weight: its tensors, their bytes, and which quantisations there are.

A weight is cut into blocks as it lies in memory, row after row, as bitsandbytes does (QLoRA,
https://arxiv.org/abs/2305.14314, section 3); the last block may be shorter. All of it is kept as
bytes, in tensors that shards divide on their first dimension. Knows nothing of how weights are
quantised, or which ones.
"""

from __future__ import annotations

from math import prod

from tightfit.errors import UnsupportedError
from tightfit.policies import QuantisationPolicy

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # those that bitsandbytes has kernels for
SCALES_PER_GROUP = 256
FP32_BYTES = 4


def check_quantisation(policy: QuantisationPolicy) -> None:
    """Refuse what there are no kernels for.

    Raises:
        UnsupportedError: not 4 bits, or not a block of `BLOCKS`.
    """
    if policy.bits != 4:
        raise UnsupportedError(
            f"a base of {policy.bits} bits is not supported; set quantization_bit: 4"
        )
    if policy.block not in BLOCKS:
        raise UnsupportedError(
            f"blocks of {policy.block} weights are not supported; "
            f"take one of {', '.join(map(str, BLOCKS))}"
        )


def quantised_shapes(
    shape: tuple[int, ...], policy: QuantisationPolicy
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the uint8 tensors that a weight of `shape` is kept in, its bias apart.

    Two weights to a byte, and a scale for each block: the four bytes of an fp32 number, or with
    `policy.double` one byte, an fp32 scale for each 256 of those, and an fp32 offset last.

    Raises:
        UnsupportedError: see `check_quantisation`.
    """
    check_quantisation(policy)
    weights = prod(shape)
    scales = _ceiling(weights, policy.block)
    packed = (_ceiling(weights, 2),)
    if not policy.double:
        return packed, (scales, FP32_BYTES)
    return packed, (scales,), (_ceiling(scales, SCALES_PER_GROUP) + 1, FP32_BYTES)


def quantised_bytes(shape: tuple[int, ...], policy: QuantisationPolicy) -> int:
    """Bytes of a quantised weight of `shape` with its scales, its bias apart.

    For each weight, with blocks of 64: 1/2 + 4/64 = 0.5625, or doubly quantised
    1/2 + 1/64 + 4/16384 = 0.5159 and four for the whole.

    Raises:
        UnsupportedError: see `check_quantisation`.
    """
    return sum(prod(tensor) for tensor in quantised_shapes(shape, policy))


def _ceiling(count: int, size: int) -> int:
    return -(-count // size)
