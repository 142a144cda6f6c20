"""What the dry run says of a card's kernels and allocator, beside the card itself."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.dry_run.allocator import CachingAllocator
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.kernels import card_kernels
from tightfit.ledger import Ledger
from tightfit.policies import Tier
from tightfit.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS = 16 * 512  # roundings and scalars

ATTENTION = [
    # query heads, key heads, tokens, width, type, masked
    (8, 8, 1024, 128, torch.bfloat16, False),
    (8, 2, 1024, 128, torch.bfloat16, False),
    (8, 8, 1024, 64, torch.float32, False),
    (8, 8, 1024, 64, torch.bfloat16, True),
    (8, 8, 1000, 128, torch.bfloat16, True),
    (4, 4, 1024, 256, torch.bfloat16, True),
]


def attend(
    case: tuple[int, int, int, int, torch.dtype, bool], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of one call, and the gradient for its output."""
    heads, shared, tokens, width, dtype, masked = case
    with ledger.labelled(Kind.PARAMETERS):
        query, key, value = (
            torch.zeros(2, n, tokens, width, dtype=dtype, device=device, requires_grad=True)
            for n in (heads, shared, shared)
        )
        mask = torch.zeros(1, 1, tokens, tokens, dtype=dtype, device=device) if masked else None
        gradient = torch.zeros(2, tokens, heads, width, dtype=dtype, device=device)
    out = functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=not masked, enable_gqa=heads != shared
    )
    return out, gradient.transpose(1, 2)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_takes_what_the_dry_run_says(
    case: tuple[int, int, int, int, torch.dtype, bool],
) -> None:
    """Never less than the card, and at most a tenth and the staging of split keys more, which a
    card with much shared memory does without."""
    capability = torch.cuda.get_device_capability()
    with fake_tensors(), Ledger() as counting, card_kernels(capability):
        out, gradient = attend(case, "cpu")
        kept = counting.total_bytes(Tier.DEVICE)
        out.backward(gradient)
        peak = counting.peak_bytes(Tier.DEVICE)
    attend(case, "cuda")[0].sum().backward()  # kernels and handles are loaded now
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out, gradient = attend(case, "cuda")
    assert torch.cuda.memory_allocated() - before == pytest.approx(kept, abs=BLOCKS)
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    measured = torch.cuda.max_memory_allocated() - before
    assert 0.9 * peak - 16 * MIB <= measured <= peak + BLOCKS


REPLAY = """
import random, sys, torch
draw = random.Random(int(sys.argv[1]))
held = {}
for _ in range(400):
    key = draw.randrange(40)
    size = 0 if draw.random() < 0.4 else int(10 ** draw.uniform(2, 7.6))
    held.pop(key, None)
    if size:
        held[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


@pytest.mark.parametrize("seed", range(3))
def test_the_allocator_reserves_what_its_replay_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    command = [sys.executable, "-c", REPLAY, str(seed)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    allocated, reserved = (int(word) for word in printed.split())
    draw = random.Random(seed)
    allocator = CachingAllocator()
    for _ in range(400):
        key = draw.randrange(40)
        size = 0 if draw.random() < 0.4 else int(10 ** draw.uniform(2, 7.6))
        allocator.resize(key, 0)
        if size:
            allocator.resize(key, size)
    assert allocator.max_allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert allocator.max_reserved_bytes == pytest.approx(reserved, rel=0.05)
