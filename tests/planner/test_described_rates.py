"""Rates of a described machine: published ones, as far as reached, and shared by its ranks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planner.conftest import make_job

from tightfit.errors import UnsupportedError
from tightfit.facts.machine import Machine, machine_of
from tightfit.planner.described_rates import described_rates, rates_notes


def machine(**keys: Any) -> Machine:
    keys["train_batch_size"] = "auto"
    found = machine_of(make_job(**keys))
    assert found is not None
    return found


def test_a_card_at_home() -> None:
    rates = described_rates(machine(gpu="4090", ram="64GiB", nvme="1TB@3.5GB/s:1.7GB/s"), "bf16")
    assert rates.matmul_flops_per_second == pytest.approx(0.87 * 165.2e12)
    assert rates.memory_bytes_per_second == pytest.approx(0.85 * 1008e9)
    assert rates.copy_bytes_per_second == pytest.approx(25.2e9, rel=0.01)
    assert rates.host_optimizer_parameters_per_second == pytest.approx(38.4e9 / 28)
    assert rates.device_optimizer_parameters_per_second == pytest.approx(0.85 * 1008e9 / 28)
    assert rates.disk_read_bytes_per_second == 3.5e9
    assert rates.disk_write_bytes_per_second == 1.7e9


def test_ranks_share_the_host_and_the_disk() -> None:
    one = described_rates(machine(gpu="1x4090", nvme="1TB"), "bf16")
    four = described_rates(machine(gpu="4x4090", nvme="1TB"), "bf16")
    assert four.matmul_flops_per_second == one.matmul_flops_per_second
    for name in (
        "host_optimizer_parameters_per_second",
        "disk_read_bytes_per_second",
        "disk_write_bytes_per_second",
    ):
        assert getattr(four, name) == pytest.approx(getattr(one, name) / 4)
    assert four.copy_bytes_per_second == pytest.approx(38.4e9 / 4), "the host's memory is less"


def test_precisions_differ() -> None:
    v100 = machine(gpu="v100-32g")
    assert described_rates(v100, "fp32").matmul_flops_per_second == pytest.approx(0.68 * 15.7e12)
    with pytest.raises(UnsupportedError, match="no rate of V100 SXM2 32 GB is known for bf16"):
        described_rates(v100, "bf16")
    assert rates_notes(v100, "bf16") == []


def test_what_it_is_reckoned_with_is_said() -> None:
    (said,) = rates_notes(machine(gpu="h100"), "bf16")
    assert "bf16 products at 712 of 989 TFLOP/s" in said
