from __future__ import annotations

import pytest

from tightfit.bill.quantised import check_quantisation, quantised_bytes, quantised_shapes
from tightfit.errors import UnsupportedError
from tightfit.policies import QuantisationPolicy

SINGLE, DOUBLE = QuantisationPolicy(double=False), QuantisationPolicy(double=True)


@pytest.mark.parametrize(
    ("shape", "policy", "shapes"),
    [
        # 256 scales are one group; the second row of the last tensor is the offset.
        ((128, 128), DOUBLE, ((8192,), (256,), (2, 4))),
        ((128, 128), SINGLE, ((8192,), (256, 4))),
        ((130, 128), DOUBLE, ((8320,), (260,), (3, 4))),
        # Blocks run from row to row, and the last may be shorter: 480 weights, 8 blocks.
        ((24, 20), DOUBLE, ((240,), (8,), (2, 4))),
        ((24, 20), SINGLE, ((240,), (8, 4))),
        ((24, 20), QuantisationPolicy(block=512), ((240,), (1,), (2, 4))),
    ],
)
def test_shapes(
    shape: tuple[int, ...], policy: QuantisationPolicy, shapes: tuple[tuple[int, ...], ...]
) -> None:
    assert quantised_shapes(shape, policy) == shapes


@pytest.mark.parametrize(
    ("policy", "bits_per_weight"),
    [
        (SINGLE, 4.5),
        # Section 3 of the QLoRA paper: "from 0.5 bits, to 8/64 + 32/(64 * 256) = 0.127 bits".
        (DOUBLE, 4.127),
    ],
)
def test_bits_for_each_weight_are_those_of_the_paper(
    policy: QuantisationPolicy, bits_per_weight: float
) -> None:
    count_bytes = quantised_bytes((4096, 4096), policy)
    assert count_bytes * 8 / 4096**2 == pytest.approx(bits_per_weight, abs=1e-4)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (QuantisationPolicy(bits=8), "a base of 8 bits is not supported; set quantization_bit: 4"),
        (
            QuantisationPolicy(block=48),
            "blocks of 48 weights are not supported; "
            "take one of 32, 64, 128, 256, 512, 1024, 2048, 4096",
        ),
    ],
)
def test_what_there_are_no_kernels_for(policy: QuantisationPolicy, message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_quantisation(policy)
    assert str(caught.value) == message
    with pytest.raises(UnsupportedError):
        quantised_bytes((64, 64), policy)
