from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.bill.shards import ModelTensors, Tensor
from tightfit.bill.table import Kind
from tightfit.bill.textbook import (
    Totals,
    base_bytes_per_parameter,
    optimizer_bytes_per_parameter,
    scale_bits_per_parameter,
    textbook_state_bytes,
    zero_bytes_per_parameter,
)
from tightfit.policies import (
    AdapterPolicy,
    OptimizerName,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

GB = 10**9  # these tables are in decimal units
BF16 = Policies(precision=PrecisionPolicy("bf16"))
HOST = PlacementPolicy(Tier.HOST, Tier.HOST)


def device_bytes(parameters: float, policies: Policies) -> dict[Kind, int]:
    return dict(textbook_state_bytes(Totals(int(parameters)), policies)[Tier.DEVICE])


def zero(ranks: int, stage: int) -> Policies:
    return replace(BF16, sharding=ShardingPolicy(ranks, stage))


def test_7b_in_mixed_precision() -> None:
    """The table of many guides: 14 + 14 + 84 = 112 GB, after https://arxiv.org/abs/1910.02054."""
    table = device_bytes(7e9, BF16)
    assert table[Kind.PARAMETERS] == table[Kind.GRADIENTS] == 14 * GB
    assert table[Kind.MASTER_WEIGHTS] + table[Kind.OPTIMIZER_STATES] == 84 * GB
    assert sum(table.values()) == 112 * GB


def test_70b_in_mixed_precision() -> None:
    table = device_bytes(70e9, BF16)
    assert table[Kind.PARAMETERS] == table[Kind.GRADIENTS] == 140 * GB
    assert sum(table.values()) == 1120 * GB


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(0, 112), (1, 14 + 14 + 84 / 8), (2, 14 + 14 / 8 + 84 / 8), (3, 14)],
)
def test_7b_on_8_cards(stage: int, gigabytes: float) -> None:
    """Some articles print 28 for stage 1 and 14 for stage 2, which leaves terms out."""
    assert sum(device_bytes(7e9, zero(8, stage)).values()) == gigabytes * GB
    assert zero_bytes_per_parameter(stage, 8) * 7 == gigabytes


ZERO_TABLE = {
    # Table 1 of https://arxiv.org/abs/1910.02054: GB per device by stage for 7.5B, 128B and 1T
    # parameters on these numbers of ranks.
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


@pytest.mark.parametrize("ranks", ZERO_TABLE)
def test_table_1_of_the_zero_paper(ranks: int) -> None:
    for billions, published in zip((7.5, 128, 1000), ZERO_TABLE[ranks], strict=True):
        for stage, gigabytes in enumerate(published, start=1):
            # Printed with about three digits, the last one cut or rounded.
            found = zero_bytes_per_parameter(stage, ranks) * billions
            assert found == pytest.approx(gigabytes, rel=3e-3, abs=0.06 if found > 1 else 5e-3)
            total = sum(device_bytes(billions * 1e9, zero(ranks, stage)).values())
            assert total == pytest.approx(found * GB, abs=8)


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, "120.0"), (1, "31.4"), (2, "16.6"), (3, "1.9")]
)
def test_figure_1_of_the_zero_paper(stage: int, gigabytes: str) -> None:
    """7.5B parameters on 64 ranks."""
    assert f"{sum(device_bytes(7.5e9, zero(64, stage)).values()) / GB:.1f}" == gigabytes


@pytest.mark.parametrize(
    ("ranks", "placement", "device", "host"),
    [
        # https://arxiv.org/abs/2101.06840: 2 bytes per parameter stay, 14 leave and are shared out.
        (1, HOST, 2, 14),
        (16, HOST, 2, 14 / 16),
    ],
)
def test_zero_offload(ranks: int, placement: PlacementPolicy, device: int, host: float) -> None:
    table = textbook_state_bytes(Totals(10**9), replace(zero(ranks, 2), placement=placement))
    assert sum(table[Tier.DEVICE].values()) == device * 10**9
    assert sum(table[Tier.HOST].values()) == host * 10**9


def test_zero_infinity_leaves_nothing_on_the_device() -> None:
    away = PlacementPolicy(Tier.HOST, Tier.NVME, Tier.NVME)
    table = textbook_state_bytes(Totals(10**9), replace(zero(4, 3), placement=away))
    assert sum(table[Tier.DEVICE].values()) == 0
    assert sum(table[Tier.HOST].values()) == 2 * 10**9 / 4
    assert sum(table[Tier.NVME].values()) == 14 * 10**9 / 4


def test_tensor_and_pipeline_parallelism_divide_everything() -> None:
    policies = replace(BF16, sharding=ShardingPolicy(16, 1, 4, 2))
    assert sum(device_bytes(8e9, policies).values()) == (4 + 12 / 2) * 8e9 / (4 * 2)


def test_scales_of_a_4_bit_base() -> None:
    """https://arxiv.org/abs/2305.14314, section 3: from 0.5 bits to 0.127, 3 GB of a 65B model."""
    plain = scale_bits_per_parameter(QuantisationPolicy(double=False))
    double = scale_bits_per_parameter(QuantisationPolicy())
    assert plain == 0.5
    assert double == pytest.approx(0.127, abs=5e-4)
    assert (plain - double) * 65 / 8 == pytest.approx(3, abs=0.05)
    assert base_bytes_per_parameter(QuantisationPolicy()) == (4 + double) / 8
    assert base_bytes_per_parameter(QuantisationPolicy(bits=8)) == 1


def test_16_bit_finetuning_of_65b() -> None:
    """More than 780 GB (https://arxiv.org/abs/2305.14314): 12 bytes each, without a master."""
    table = device_bytes(65.2e9, BF16)
    without_master = sum(table.values()) - table[Kind.MASTER_WEIGHTS]
    assert 780 < without_master / GB < 790


def test_qlora_of_65b() -> None:
    """A base of 65B weights takes 33.5 GB, and adapters 16 bytes for each of theirs."""
    policies = replace(BF16, adapter=AdapterPolicy(), quantisation=QuantisationPolicy())
    table = textbook_state_bytes(Totals(10**8, 10**9, 65 * 10**9), policies)[Tier.DEVICE]
    base = 65 * base_bytes_per_parameter(QuantisationPolicy()) * GB
    assert base == pytest.approx(33.5 * GB, rel=2e-3)
    assert sum(table.values()) == pytest.approx(base + 2 * GB + 1.6 * GB)


@pytest.mark.parametrize(
    ("name", "momentum", "expected"),
    [
        (OptimizerName.ADAMW, False, 8),
        (OptimizerName.LION, False, 4),
        (OptimizerName.SGD, False, 0),
        (OptimizerName.SGD, True, 4),
        (OptimizerName.ADAFACTOR, False, 0),
        (OptimizerName.ADAMW_8BIT, False, 2 + 2 * 4 / 256),
        (OptimizerName.ADAMW_COMPACT, False, 2 + 2 * 4 / 256),
        (OptimizerName.LION_8BIT, False, 1 + 4 / 256),
    ],
)
def test_optimizer_states(name: OptimizerName, momentum: bool, expected: float) -> None:
    assert optimizer_bytes_per_parameter(name, momentum=momentum) == expected


def test_totals_of_shapes() -> None:
    model = ModelTensors(
        (Tensor((4, 2), trainable=False),),
        ((Tensor((3, 2), count=5), Tensor((7, 2), trainable=False, quantised=True)),),
        (),
    )
    assert Totals.of(model) == Totals(trainable=30, frozen=8, quantised=14)
