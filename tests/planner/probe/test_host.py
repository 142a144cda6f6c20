"""Measuring the CPU for real, and cards that are not there through stand-ins."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.planner.probe.machines import accelerator, host_figures

from tightfit.facts.hardware import PcieLink
from tightfit.planner import measure
from tightfit.planner.probe import host
from tightfit.planner.probe.host import (
    best_of,
    measure_cards,
    measure_host,
    thread_counts,
    torch_index,
)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_counts_of_threads(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


def test_the_best_of_each_figure_counts() -> None:
    slow = dataclasses.replace(host_figures(1, 1.0), matmul={64: 5e9}, memory=9e9)
    best = best_of(slow, dataclasses.replace(host_figures(1, 1.0), operation_seconds=1e-6))
    assert best.matmul == {64: 40e9, 1024: 80e9}  # also of widths that only one has got to
    assert (best.memory, best.operation_seconds) == (9e9, 1e-6)


def test_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SECONDS", 0.001)
    monkeypatch.setattr(host, "_HOST_WIDTHS", (16, 64))
    before = torch.get_num_threads()
    (found,) = measure_host([1], rounds=2)
    assert found.threads == 1
    assert set(found.matmul) == {16, 64}
    assert torch.get_num_threads() == before


class FakeCuda:
    """Two cards, in another order than the driver's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used: list[Any] = []
        uuids = ["bbbb", "aaaa"]
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
        )
        patch.setattr(torch.cuda, "device", self.using)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)

    def using(self, device: torch.device) -> Any:
        self.used.append(device)
        return pytest.MonkeyPatch.context()


def test_cards_are_told_apart_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert torch_index(accelerator("GPU-aaaa")) == 1
    assert torch_index(accelerator("GPU-bbbb")) == 0
    assert torch_index(accelerator("")) == 0


def test_a_card_is_looked_at_right_after_it_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link is slow again when it has nothing to do."""
    cuda = FakeCuda(monkeypatch)
    awake = {"now": False}

    def copies(device: torch.device, seconds: float) -> measure.CopyRates:
        awake["now"] = True
        return measure.CopyRates(24e9, 20e9, 40e9, 9e9, 7e9)

    def products(device: Any, dtype: torch.dtype, widths: Any, **given: float) -> Any:
        awake["now"] = False
        if dtype is torch.float16:
            return {}  # this card cannot
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return {4096: 2e12 if tf32 else 1e12}

    def look_again() -> Any:
        pcie = PcieLink(4 if awake["now"] else 1, 4, 4, 16)
        return [dataclasses.replace(accelerator("GPU-aaaa"), pcie=pcie)]

    monkeypatch.setattr(measure, "copy_rates", copies)
    monkeypatch.setattr(measure, "matmul_rates", products)
    for name in ("memory_rate", "optimizer_rate", "operation_seconds"):
        monkeypatch.setattr(measure, name, lambda device, seconds: 1.0)
    (found,) = measure_cards([accelerator("GPU-aaaa")], look_again)
    assert found.pcie is not None
    assert (found.pcie.generation, found.pcie.lanes) == (4, 4)
    assert set(found.matmul) == {"fp32", "bf16", "tf32"}
    assert (found.matmul["fp32"][4096], found.matmul["tf32"][4096]) == (1e12, 2e12)
    assert cuda.used == [torch.device("cuda", 1)]
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
