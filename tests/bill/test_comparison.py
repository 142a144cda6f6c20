from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.bill.comparison import ComparisonRow, compare_sharding
from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.errors import UnsupportedError
from tightfit.policies import (
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    ShardingPolicy,
    Tier,
)

GB = 10**9
BF16 = Policies(precision=PrecisionPolicy("bf16"))
# 7B parameters in 28 layers and two ends, rows that eight ranks divide evenly.
SEVEN_BILLION = ModelTensors(
    (Tensor((100_000, 2_500)),),
    ((Tensor((80_000, 2_900), divided_dim=0),),) * 28,
    (Tensor((4_000,)), Tensor((100_960, 2_500))),
)


@pytest.fixture(scope="module")
def rows() -> dict[str, ComparisonRow]:
    return {row.name: row for row in compare_sharding(SEVEN_BILLION, BF16)}


def test_rows(rows: dict[str, ComparisonRow]) -> None:
    plain = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    expected = [name for each in plain for name in (each, f"{each}, optimizer on host")]
    assert list(rows) == [*expected, "ZeRO-3, optimizer and parameters on host"]
    for name, row in rows.items():
        assert row.policies.sharding.ranks == 8
        assert name.startswith("DDP") == (row.policies.sharding.zero_stage == 0)


@pytest.mark.parametrize(
    ("name", "device", "host"),
    [
        # GB for 7B parameters, of which this model has 6.998.
        ("DDP", 112, 0),
        ("DDP, optimizer on host", 14, 98),
        ("ZeRO-1", 38.5, 0),
        ("ZeRO-2", 26.25, 0),
        ("ZeRO-2, optimizer on host", 14, 98 / 8),
        ("ZeRO-3", 14, 0),
        ("ZeRO-3, optimizer on host", 14 / 8, 98 / 8),
        ("ZeRO-3, optimizer and parameters on host", 0, 112 / 8),
    ],
)
def test_textbook_column(
    rows: dict[str, ComparisonRow], name: str, device: float, host: float
) -> None:
    parameters = SEVEN_BILLION.count(trainable=True)
    bill = rows[name].textbook
    assert bill.device_bytes == pytest.approx(device * parameters / 7, abs=64)
    assert bill.host_bytes == pytest.approx(host * parameters / 7, abs=64)


def test_tightfit_column(rows: dict[str, ComparisonRow]) -> None:
    shard = SEVEN_BILLION.count(trainable=True) / 8
    root, layer = 2 * (2 * 502_400_000 + 8_000) / 2, 2 * 232_000_000
    kinds = rows["ZeRO-3"].tightfit.tiers[Tier.DEVICE]
    assert kinds[Kind.PARAMETERS] == kinds[Kind.GRADIENTS] == 2 * shard
    assert kinds[Kind.MASTER_WEIGHTS] == 4 * shard
    assert kinds[Kind.COLLECTIVES] == 2 * root + 3 * layer
    assert rows["ZeRO-3, optimizer on host"].tightfit.device_bytes == (
        2 * shard + 2 * root + 3 * layer
    )
    away = rows["ZeRO-3, optimizer and parameters on host"].tightfit
    # Fetched before they are gathered: the root's shards, and a layer's.
    fetched = (2 * root + 2 * layer) / 2 / 8
    assert away.tiers[Tier.DEVICE] == {
        Kind.PARAMETERS: fetched,
        Kind.COLLECTIVES: 2 * root + 3 * layer,
    }
    assert away.host_bytes == pytest.approx(16 * shard, abs=200)
    assert away.nvme_bytes == 0


@pytest.mark.parametrize(
    ("bill", "tail", "names"),
    [
        ("textbook", "", ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")),
        ("textbook", ", optimizer on host", ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")),
        ("tightfit", "", ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")),
        # With nothing else on the card, a shard beside whole parameters takes more than DDP.
        ("tightfit", ", optimizer on host", ("ZeRO-1", "DDP", "ZeRO-3")),
    ],
)
def test_from_most_to_least(
    rows: dict[str, ComparisonRow], bill: str, tail: str, names: tuple[str, ...]
) -> None:
    sizes = [getattr(rows[name + tail], bill).device_bytes for name in names]
    assert sizes == sorted(sizes, reverse=True)


def test_cards_and_what_else_the_job_says() -> None:
    sharding = ShardingPolicy(ranks=4, zero_stage=2, tensor_parallel=2)
    placement = PlacementPolicy(Tier.HOST, Tier.NVME, activations=Tier.HOST)
    policies = replace(BF16, sharding=sharding, placement=placement)
    for cards, expected in ((None, 4), (16, 16)):
        for row in compare_sharding(SEVEN_BILLION, policies, cards=cards):
            assert row.policies.sharding.ranks == expected
            assert row.policies.sharding.tensor_parallel == 2
            assert row.policies.placement.activations is Tier.HOST
            assert row.tightfit.nvme_bytes == 0
    with pytest.raises(UnsupportedError, match="take a multiple of 2"):
        compare_sharding(SEVEN_BILLION, policies, cards=3)
