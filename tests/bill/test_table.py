from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.bill.table import Difference, Kind, MemoryTable, Phase
from tightfit.policies import Tier

TABLE = MemoryTable(
    {
        Phase.FORWARD: {
            Tier.DEVICE: {Kind.PARAMETERS: 100, Kind.ACTIVATIONS: 50},
            Tier.HOST: {Kind.OPTIMIZER_STATES: 30},
        },
        Phase.BACKWARD: {Tier.DEVICE: {Kind.PARAMETERS: 100, Kind.GRADIENTS: 70}},
        Phase.STEP: {Tier.DEVICE: {Kind.PARAMETERS: 100}, Tier.HOST: {Kind.OPTIMIZER_STATES: 40}},
    }
)
KINDS = st.dictionaries(
    st.sampled_from([kind for kind in Kind if kind is not Kind.MARGIN]),
    st.integers(1, 2**45),
    max_size=4,
)
TABLES = st.builds(
    MemoryTable,
    st.dictionaries(st.sampled_from(Phase), st.dictionaries(st.sampled_from(Tier), KINDS)),
)


def test_peaks() -> None:
    assert TABLE.phase_peak_bytes(Phase.FORWARD, Tier.DEVICE) == 150
    assert TABLE.phase_peak_bytes(Phase.BACKWARD, Tier.HOST) == 0
    assert TABLE.phase_peak_bytes(Phase.SAVE, Tier.DEVICE) == 0
    assert TABLE.peak_bytes(Tier.DEVICE) == 170
    assert TABLE.peak_phase(Tier.DEVICE) is Phase.BACKWARD
    assert TABLE.kinds_at_peak(Tier.DEVICE) == {Kind.PARAMETERS: 100, Kind.GRADIENTS: 70}
    assert TABLE.peak_phase(Tier.HOST) is Phase.STEP
    assert TABLE.tiers() == [Tier.DEVICE, Tier.HOST]


def test_an_empty_table_has_no_peak() -> None:
    empty = MemoryTable({})
    assert empty.peak_bytes(Tier.DEVICE) == 0
    assert empty.peak_phase(Tier.DEVICE) is None
    assert empty.kinds_at_peak(Tier.DEVICE) == {}
    assert empty.tiers() == []


def test_json_names_are_those_of_the_vocabulary() -> None:
    data = json.loads(json.dumps(TABLE.to_json()))
    assert data["backward"] == {"device": {"parameters": 100, "gradients": 70}}
    assert data["step"]["host"] == {"optimizer states": 40}


@given(TABLES)
def test_json_keeps_every_count(table: MemoryTable) -> None:
    read = MemoryTable.from_json(json.loads(json.dumps(table.to_json())))
    assert set(read.peaks) == set(table.peaks)
    for phase in Phase:
        for tier in Tier:
            before = dict(table.peaks.get(phase, {}).get(tier, {}))
            assert dict(read.peaks.get(phase, {}).get(tier, {})) == before


@given(TABLES)
def test_margin_is_one_percent_of_every_total_rounded_down(table: MemoryTable) -> None:
    wider = table.with_margin()
    for phase in Phase:
        for tier in Tier:
            plain = table.phase_peak_bytes(phase, tier)
            extra = wider.phase_peak_bytes(phase, tier) - plain
            assert abs(extra - plain / 100) <= 1 + plain * 1e-12
            assert wider.peaks.get(phase, {}).get(tier, {}).get(Kind.MARGIN, 0) == extra


def test_margin_leaves_the_table_as_it_was() -> None:
    before = TABLE.to_json()
    TABLE.with_margin(0.5)
    assert TABLE.to_json() == before


def test_diff_lists_totals_then_kinds_of_every_phase() -> None:
    measured = MemoryTable(
        {
            Phase.BACKWARD: {Tier.DEVICE: {Kind.PARAMETERS: 100, Kind.TEMPORARIES: 60}},
            Phase.EVAL: {Tier.DEVICE: {Kind.PARAMETERS: 100}},
        }
    )
    rows = TABLE.diff(measured)
    common = [row for row in rows if row.phase is Phase.BACKWARD]
    assert common == [
        Difference(Phase.BACKWARD, Tier.DEVICE, None, 170, 160),
        Difference(Phase.BACKWARD, Tier.DEVICE, Kind.PARAMETERS, 100, 100),
        Difference(Phase.BACKWARD, Tier.DEVICE, Kind.GRADIENTS, 70, 0),
        Difference(Phase.BACKWARD, Tier.DEVICE, Kind.TEMPORARIES, 0, 60),
    ]
    assert common[0].error == pytest.approx(0.0625)
    assert common[2].error is None
    assert common[3].error == -1.0
    only_measured = [row for row in rows if row.phase is Phase.EVAL]
    assert [(row.kind, row.predicted_bytes, row.measured_bytes) for row in only_measured] == [
        (None, 0, 100),
        (Kind.PARAMETERS, 0, 100),
    ]
    assert {row.phase for row in rows} <= {*TABLE.peaks, *measured.peaks}


def test_plus_adds_to_every_phase() -> None:
    more = TABLE.plus(Tier.DEVICE, Kind.RUNTIME, 7)
    for phase in TABLE.peaks:
        before = TABLE.phase_peak_bytes(phase, Tier.DEVICE)
        assert more.phase_peak_bytes(phase, Tier.DEVICE) == before + 7
        assert more.phase_peak_bytes(phase, Tier.HOST) == TABLE.phase_peak_bytes(phase, Tier.HOST)
    twice = more.plus(Tier.DEVICE, Kind.RUNTIME, 3)
    assert twice.kinds_at_peak(Tier.DEVICE)[Kind.RUNTIME] == 10
