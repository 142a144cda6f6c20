"""Companded codes, against the functions of their paper."""

from __future__ import annotations

import pytest
import torch

from tightfit.engine.companding import Root, Softsign
from tightfit.engine.moments import WORK_BUFFERS, Code, make_table

BLOCK = 256


def _values(count: int) -> torch.Tensor:
    """Over many magnitudes, of both signs."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) ** 3


def _narrowed(code: Code, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-values.numel() // BLOCK))
    code.narrow(values.clone(), codes, scales, torch.empty(WORK_BUFFERS * values.numel()))
    return codes, scales


def _widened(code: Code, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codes.numel())
    code.widen(codes, scales, out, torch.empty(WORK_BUFFERS * codes.numel()))
    return out


@pytest.mark.parametrize("count", [1, BLOCK, 5000])
def test_softsign_is_that_of_the_paper(count: int) -> None:
    values = _values(count)
    codes, scales = _narrowed(Softsign(), values)
    for block, code, scale in zip(values.split(BLOCK), codes.split(BLOCK), scales, strict=True):
        assert scale == block.abs().max()
        x = (block / scale).double()
        steps = 127 * 2 * x / (1 + x.abs())
        assert bool((code - 128.0 - steps).abs().le(0.5 + 1e-4).all())
        z = (code.double() - 128) / 127
        expected = scale * z / (2 - z.abs())
        found = _widened(Softsign(), code, scale.view(1))
        assert torch.allclose(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [1, BLOCK, 5000])
def test_root_is_that_of_the_paper_but_for_the_least(count: int) -> None:
    values = _values(count) ** 2
    codes, scales = _narrowed(Root(), values)
    for block, code, scale in zip(values.split(BLOCK), codes.split(BLOCK), scales, strict=True):
        steps = 255 * block.double().sqrt() / scale
        assert bool((code - steps.clamp(min=1.0)).abs().le(0.5 + 1e-4).all())
        found = _widened(Root(), code, scale.view(1))
        assert torch.allclose(found.double(), (code.double() / 255 * scale) ** 2, rtol=1e-6)


@pytest.mark.parametrize("code", [Softsign(), Root()], ids=["both signs", "never negative"])
def test_zeros_stay_and_what_was_narrowed_is_narrowed_to_the_same(code: Code) -> None:
    values = _values(5000) ** 2
    values[::7] = 0.0
    values[512:1024] = 0.0
    codes, scales = _narrowed(code, values)
    found = _widened(code, codes, scales)
    assert bool((found[values == 0] == 0).all())
    again = _narrowed(code, found)
    assert torch.equal(again[0], codes)
    assert torch.allclose(again[1], scales, rtol=1e-6, atol=0)


def test_a_second_moment_that_is_not_0_does_not_become_0() -> None:
    values = torch.full((1000,), 1e-20)
    values[3] = 1.0
    assert bool((_widened(Root(), *_narrowed(Root(), values)) > 0).all())


@pytest.mark.parametrize(("code", "signed"), [(Softsign(), True), (Root(), False)])
def test_the_error_is_below_that_of_bitsandbytes_code(code: Code, signed: bool) -> None:
    """Of moments as AdamW makes them of normal gradients."""
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    values = values if signed else values**2
    table = make_table(torch.device("cpu"), signed=signed)
    own, other = (
        float((_widened(each, *_narrowed(each, values)) - values).norm()) for each in (code, table)
    )
    assert own < 0.8 * other
