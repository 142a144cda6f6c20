"""What pictures are drawn from says the same as the limits do."""

from __future__ import annotations

import pytest

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.report.chart import TierChart, tier_charts
from tightfit.units import MIB


def chart(bill: MemoryTable, limits: Limits, tier: Tier = Tier.DEVICE) -> TierChart:
    return next(chart for chart in tier_charts(bill, limits) if chart.tier is tier)


@pytest.mark.parametrize(
    ("tier", "limits", "said"),
    [
        (Tier.DEVICE, Limits(), "device: peak 2.25 GiB in backward, no limit"),
        (
            Tier.DEVICE,
            Limits(device_bytes=2000 * MIB),
            "device: peak 2.25 GiB in backward, device limit 1.95 GiB: 300.0 MiB missing",
        ),
        (
            Tier.DEVICE,
            Limits(device_bytes=2300 * MIB),
            "device: peak 2.25 GiB in backward, device limit 2.25 GiB: fits, 0 B to spare",
        ),
        (
            Tier.HOST,
            Limits(host_bytes=500 * MIB),
            "host: peak 400.0 MiB in forward, host limit 500.0 MiB: fits, 100.0 MiB to spare",
        ),
        (
            Tier.HOST,
            Limits(shared_bytes=2400 * MIB),
            "host: peak 400.0 MiB in forward, RAM limit 2.34 GiB less 2.25 GiB of the other tiers: "
            "300.0 MiB missing",
        ),
        (
            Tier.HOST,
            Limits(shared_bytes=1000 * MIB),
            "host: peak 400.0 MiB in forward, "
            "RAM limit 1000.0 MiB less 2.25 GiB of the other tiers: "
            "400.0 MiB missing",
        ),
        (
            Tier.DEVICE,
            Limits(device_bytes=2300 * MIB, shared_bytes=2600 * MIB),
            "device: peak 2.25 GiB in backward, "
            "RAM limit 2.54 GiB less 400.0 MiB of the other tiers: "
            "100.0 MiB missing",
        ),
    ],
)
def test_the_heading(bill: MemoryTable, tier: Tier, limits: Limits, said: str) -> None:
    assert chart(bill, limits, tier).heading() == said


def test_host_and_pinned_share_the_host_limit(full_bill: MemoryTable) -> None:
    limits = Limits(host_bytes=(2 * 364 - 1) * MIB)
    for tier in (Tier.HOST, Tier.PINNED):
        shown = chart(full_bill, limits, tier)
        assert shown.over_bytes(shown.highest) == MIB == limits.missing_bytes(full_bill)
    assert chart(full_bill, limits, Tier.NVME).room is None


def test_bars_hold_what_the_table_holds(bill: MemoryTable) -> None:
    device, host = tier_charts(bill, Limits())
    assert (device.tier, host.tier) == (Tier.DEVICE, Tier.HOST)
    for shown in (device, host):
        assert [bar.phase for bar in shown.bars] == list(bill.peaks)
        for bar in shown.bars:
            assert bar.total_bytes == bill.phase_peak_bytes(bar.phase, shown.tier)
    assert host.kinds() == [Kind.TRANSFER]
    assert device.highest.phase is Phase.BACKWARD
    assert dict(device.highest.segments)[Kind.ACTIVATIONS] == 4


@pytest.mark.parametrize(
    ("limit_mib", "scale_mib", "drawn"),
    [
        (None, 2300, False),
        (1000, 2300, True),
        (2300, 2300, True),
        (3000, 3000, True),
        (4600, 4600, True),
        (4601, 2300, False),
    ],
)
def test_a_far_limit_does_not_squeeze_the_bars(
    bill: MemoryTable, limit_mib: int | None, scale_mib: int, drawn: bool
) -> None:
    limit = None if limit_mib is None else limit_mib * MIB
    shown = chart(bill, Limits(device_bytes=limit))
    assert shown.scale_bytes == scale_mib * MIB
    assert shown.drawn_limit_bytes == (limit if drawn else None)


def test_an_empty_table_has_no_charts() -> None:
    assert tier_charts(MemoryTable({}), Limits(device_bytes=1)) == []
