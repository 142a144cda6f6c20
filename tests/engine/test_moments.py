"""8-bit codes and scales, against bitsandbytes and the definition of nearest."""

from __future__ import annotations

import pytest
import torch

from tightfit.engine.moments import (
    WORK_BUFFERS,
    Table,
    dynamic_map,
    make_table,
)

BOTH = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
Quantised = tuple[torch.Tensor, torch.Tensor]


def _moments(count: int, *, signed: bool) -> torch.Tensor:
    """Values over many magnitudes."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) ** 3
    return values if signed else values.abs()


def _quantised(values: torch.Tensor, table: Table) -> Quantised:
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-values.numel() // 256))
    table.narrow(values.clone(), codes, scales, torch.empty(WORK_BUFFERS * values.numel()))
    return codes, scales


def _dequantised(codes: torch.Tensor, scales: torch.Tensor, table: Table) -> torch.Tensor:
    out = torch.empty(codes.numel())
    table.widen(codes, scales, out, torch.empty(WORK_BUFFERS * codes.numel()))
    return out


@BOTH
def test_the_map_is_that_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    ours = torch.tensor(dynamic_map(signed=signed))
    theirs = functional.create_dynamic_map(signed=signed)
    assert torch.allclose(ours, theirs, rtol=2**-22, atol=0)  # theirs is computed in fp32
    assert bool((ours == 0).any())


@BOTH
@pytest.mark.parametrize("count", [4096, 5000, 256 * 33 + 1, 100])
def test_codes_are_nearest_or_next_to_it_at_a_border(signed: bool, count: int) -> None:
    values, table = _moments(count, signed=signed), make_table(torch.device("cpu"), signed=signed)
    codes, scales = _quantised(values, table)
    spread = scales.repeat_interleave(256)[:count]
    for block, scale in zip(values.split(256), scales, strict=True):
        assert scale == block.abs().max()
    borders = (table.decode[1:] + table.decode[:-1]) / 2
    nearest = torch.bucketize(values / spread, borders)
    other = codes != nearest
    assert other.float().mean() < 0.05
    crossed = borders[torch.minimum(codes, nearest)[other].long()]
    scaled = (values / spread)[other]
    assert bool((codes[other].int() - nearest[other]).abs().le(1).all())
    # Where 0 is next, only the lowest unsigned border was moved, to 0 itself.
    near = (scaled - crossed).abs() <= crossed.abs() / 256
    assert bool((near | (not signed and crossed == borders[0])).all())


@BOTH
def test_the_error_is_that_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values, table = _moments(2**16, signed=signed), make_table(torch.device("cpu"), signed=signed)
    ours = _dequantised(*_quantised(values, table), table)
    theirs_codes, state = functional.quantize_blockwise(
        values, code=functional.create_dynamic_map(signed=signed), blocksize=256
    )
    theirs = functional.dequantize_blockwise(theirs_codes, state)
    error, expected = (float((each - values).norm()) for each in (ours, theirs))
    assert error < 1.05 * expected


@BOTH
def test_zeros_stay_and_nothing_else_becomes_zero_where_roots_are_divided_by(signed: bool) -> None:
    table = make_table(torch.device("cpu"), signed=signed)
    values = torch.zeros(1000)
    values[::7] = 1e-12
    values[3] = 1.0
    values[512:] = 0  # two blocks of zeros, one of them short
    found = _dequantised(*_quantised(values, table), table)
    assert bool((found[values == 0] == 0).all())
    assert bool(found[values > 0][1:].gt(0).all()) is not signed


@BOTH
def test_what_was_quantised_is_quantised_to_the_same(signed: bool) -> None:
    table = make_table(torch.device("cpu"), signed=signed)
    codes, scales = _quantised(_moments(5000, signed=signed), table)
    again = _quantised(_dequantised(codes, scales, table), table)
    assert torch.equal(again[0], codes)
    # The signed map has 1 and no -1: a block whose largest value is negative shrinks a little.
    assert torch.allclose(again[1], scales, rtol=0.008 if signed else 0, atol=0)
