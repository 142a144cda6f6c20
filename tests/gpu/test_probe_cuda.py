"""A probe of a real card: figures that a card can have, and a plan that is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tightfit.launch.link import measure_link
from tightfit.planner import measure
from tightfit.planner.machine import usable_hardware
from tightfit.planner.probe.host import measure_cards, torch_index

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")


def test_a_card(tmp_path: Path) -> None:
    cards = usable_hardware(tmp_path).accelerators
    found = measure_cards(cards[:1], lambda: usable_hardware(tmp_path).accelerators)[0]
    assert {"fp32", "fp16"} <= set(found.matmul)
    widest = max(found.matmul["fp16"])
    assert found.matmul["fp16"][widest] > 1e12
    assert found.memory > 50e9
    # Page-locked copies are no slower, and both directions no slower than the slower one.
    assert found.copies.to_card > 0.9 * found.copies.pageable_to_card
    assert found.copies.both > 0.9 * min(found.copies.to_card, found.copies.to_host)
    assert torch_index(cards[0]) < torch.cuda.device_count()
    if found.pcie is not None:
        assert 1 <= found.pcie.lanes <= found.pcie.most_lanes


def test_events_and_the_clock_agree() -> None:
    device = torch.device("cuda", 0)
    width = 4096
    seconds = measure.matmul_operations(device, width) / measure.matmul_rate(
        device, torch.float32, width
    )
    values, gradients = (
        torch.randn(measure.matmul_rows(device), width, device=device) for _ in range(2)
    )
    weight = torch.randn(width, width, device=device)

    def synchronised() -> None:
        _ = values @ weight.T, gradients @ weight, gradients.T @ values
        torch.cuda.synchronize()

    by_clock = measure.seconds_per_call(synchronised, torch.device("cpu"))
    assert seconds == pytest.approx(by_clock, rel=0.3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_the_link_between_cards() -> None:
    found = measure_link(2, "cuda", quick=True)
    assert found.backend == "nccl"
    assert found.together is None
    assert all(line.bytes_per_second > 1e8 for line in found.lines.values())
