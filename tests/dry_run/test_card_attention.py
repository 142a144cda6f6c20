"""Which kernel a card runs, and its bytes against the sizes in torch's sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.card_attention import Path, path_of
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.kernels import card_kernels
from tightfit.ledger import Ledger
from tightfit.policies import Tier

A100, RTX_3090, RTX_4090, H100, T4, V100 = (8, 0), (8, 6), (8, 9), (9, 0), (7, 5), (7, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "heads", "width", "options", "path"),
    [
        (A100, BF16, (8, 8), 128, {}, Path.FLASH),
        (A100, BF16, (8, 2), 128, {}, Path.FLASH),
        (H100, FP16, (8, 2), 64, {"dropout": 0.1}, Path.FLASH),
        (A100, BF16, (8, 8), 80, {}, Path.FLASH),
        (A100, BF16, (8, 8), 128, {"masked": True}, Path.EFFICIENT),
        (A100, BF16, (8, 8), 512, {}, Path.EFFICIENT),
        (A100, FP32, (8, 8), 128, {}, Path.EFFICIENT),
        (A100, FP32, (8, 2), 128, {}, Path.MATH),  # no groups before torch 2.14
        (A100, torch.float64, (8, 8), 128, {}, Path.MATH),
        (A100, BF16, (8, 8), 100, {"masked": True}, Path.MATH),  # not a multiple of 8
        (RTX_4090, BF16, (8, 8), 256, {}, Path.FLASH),
        (RTX_4090, BF16, (8, 8), 256, {"dropout": 0.1}, Path.EFFICIENT),
        (RTX_3090, BF16, (8, 8), 224, {}, Path.EFFICIENT),
        (A100, BF16, (8, 8), 224, {}, Path.FLASH),
        (T4, FP16, (8, 8), 128, {}, Path.EFFICIENT),
        (T4, BF16, (8, 8), 128, {}, Path.MATH),
        (V100, FP32, (8, 8), 127, {}, Path.EFFICIENT),
        (A100, FP32, (8, 8), 126, {}, Path.MATH),
    ],
)
def test_the_kernel_torch_chooses(
    capability: tuple[int, int],
    dtype: torch.dtype,
    heads: tuple[int, int],
    width: int,
    options: dict[str, Any],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tightfit.dry_run.card_attention._EFFICIENT_GROUPS", False)
    query, key = (
        torch.empty(1, count, 64, width, dtype=dtype, device="meta", requires_grad=True)
        for count in heads
    )
    found = path_of(query, key, key, capability=capability, **{"masked": False, **options})
    assert found is path


def test_groups_are_efficient_where_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.dry_run.card_attention._EFFICIENT_GROUPS", True)
    query, key = (torch.empty(1, count, 64, 128, device="meta") for count in (8, 2))
    assert path_of(query, key, key, capability=A100, masked=False) is Path.EFFICIENT


def test_causal_rectangles_are_not_for_flash() -> None:
    query, key = (torch.empty(1, 8, n, 128, dtype=BF16, device="meta") for n in (3, 64))
    choose = {"capability": A100, "masked": False}
    assert path_of(query, key, key, **choose) is Path.FLASH  # type: ignore[arg-type]
    assert path_of(query, key, key, **choose, causal=True) is Path.EFFICIENT  # type: ignore[arg-type]


def attend(
    heads: tuple[int, int],
    length: int,
    width: int,
    dtype: torch.dtype,
    mask: torch.dtype | None = None,
    batch: int = 2,
) -> tuple[int, int]:
    """Bytes that forward leaves behind, and the most that backward adds to them."""
    with fake_tensors(), Ledger() as counting, card_kernels(A100):
        with ledger.labelled(Kind.PARAMETERS):
            query, key, value = (
                torch.empty(batch, count, length, width, dtype=dtype, requires_grad=True)
                for count in (heads[0], heads[1], heads[1])
            )
            scores = None if mask is None else torch.zeros(1, 1, length, length, dtype=mask)
            gradient = torch.empty(batch, length, heads[0], width, dtype=dtype).transpose(1, 2)
        before = counting.total_bytes(Tier.DEVICE)
        counting.set_section(Phase.FORWARD)
        out = functional.scaled_dot_product_attention(
            query, key, value, scores, is_causal=mask is None, enable_gqa=heads[0] != heads[1]
        )
        kept = counting.total_bytes(Tier.DEVICE) - before
        assert counting.kinds(Tier.DEVICE).get(Kind.ACTIVATIONS, 0) == kept
        counting.set_section(Phase.BACKWARD)
        out.backward(gradient)
        backward = counting.sections()[Phase.BACKWARD, ""][Tier.DEVICE]
        return kept, sum(backward.values()) - before - kept


def test_flash_keeps_output_and_logarithms_and_takes_an_fp32_gradient() -> None:
    kept, added = attend((8, 8), 300, 128, BF16)
    tensor = 2 * 8 * 300 * 128
    assert kept == 2 * tensor + 4 * 2 * 8 * 300
    rows = 384  # a multiple of 128
    assert added == 3 * 2 * tensor + 4 * 2 * 8 * rows * (1 + 128)


def test_flash_takes_whole_gradients_of_shared_keys_and_values() -> None:
    kept, added = attend((8, 2), 256, 64, BF16)
    tensor, shared = 2 * 8 * 256 * 64, 2 * 2 * 256 * 64
    assert kept == 2 * tensor + 4 * 2 * 8 * 256
    gradients = 2 * (tensor + 2 * shared)
    assert added == gradients + 4 * 2 * 8 * 256 * (1 + 64) + 2 * 2 * tensor


def test_flash_pads_narrow_heads() -> None:
    """Heads of 60 run as heads of 64, and so do what is kept of queries, keys and values."""
    kept, _ = attend((8, 8), 256, 60, BF16)
    assert kept == 4 * 2 * (2 * 8 * 256 * 64) + 4 * 2 * 8 * 256


@pytest.mark.parametrize(
    ("length", "mask", "mask_bytes"),
    [
        (256, BF16, 0),  # the model's own tensor
        (256, torch.bool, 2 * 256 * 256),  # one that is added to the scores
        (250, BF16, 2 * 250 * 256),  # rows padded to 16 elements
    ],
)
def test_a_mask_is_kept_as_the_kernel_reads_it(
    length: int, mask: torch.dtype, mask_bytes: int
) -> None:
    kept, added = attend((8, 8), length, 64, BF16, mask)
    tensor = 2 * 8 * length * 64
    scalars = kept - (2 * tensor + 4 * 2 * 8 * 256 + mask_bytes)  # logarithms: a multiple of 32
    assert 0 <= scalars <= 8
    assert added == 3 * 2 * tensor + 4 * 2 * 8 * (length + 256 * 64)


def test_in_fp32_the_efficient_kernel_runs_without_scores() -> None:
    kept, added = attend((8, 8), 256, 128, FP32)
    tensor = 4 * 2 * 8 * 256 * 128
    assert kept == tensor + 4 * 2 * 8 * 256
    assert added == 3 * tensor + 4 * 2 * 8 * 256 + tensor


def test_wide_heads_with_a_mask_add_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gemma 3's width: forward takes an fp32 output besides, backward a staging area."""
    length, width = 256, 256
    with fake_tensors(), Ledger() as counting, card_kernels(A100):
        with ledger.labelled(Kind.PARAMETERS):
            query = torch.empty(1, 4, length, width, dtype=BF16)
            mask = torch.zeros(1, 1, length, length, dtype=BF16)
        before = counting.total_bytes(Tier.DEVICE)
        functional.scaled_dot_product_attention(query, query, query, mask)
    tensor = 4 * length * width
    assert counting.peak_bytes(Tier.DEVICE) - before == 2 * tensor + 4 * 4 * length + 4 * tensor
    _, added = attend((4, 4), length, width, BF16, BF16, batch=1)
    staging = 4 * 4 * 4 * 64 * 2 * width  # 4 heads x 4 splits x 64 keys, for keys and values
    assert added == 3 * 2 * tensor + 4 * 4 * length + 4 * tensor + staging


def test_the_math_kernel_holds_all_scores_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.dry_run.card_attention._EFFICIENT_GROUPS", False)
    kept, _ = attend((8, 2), 256, 64, FP32)
    assert kept >= 4 * 2 * 8 * 256 * 256
