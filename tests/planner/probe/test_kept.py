"""Probes on disk: the same when read again, and never more than a note when they cannot be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightfit.facts.hardware import Hardware
from tightfit.planner.probe.figures import ADAPTER, Probe
from tightfit.planner.probe.kept import file_of, identity_of, read_probe, write_probe
from tightfit.planner.probe.known import RankShare, rates_of

MakeProbe = Callable[..., Probe]


def test_what_is_kept_is_read_again(make_probe: MakeProbe, hardware: Hardware) -> None:
    probe = make_probe()
    path = write_probe(probe)
    assert read_probe(identity_of(hardware)) == (probe, None)
    write_probe(dataclasses.replace(probe, made="2026-12-02T10:00:00+00:00"))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    read, _ = read_probe(identity_of(hardware))
    assert read is not None
    assert read.made.startswith("2026-12-02")


def test_nobody_has_probed(hardware: Hardware) -> None:
    assert read_probe(identity_of(hardware)) == (None, None)


@pytest.mark.parametrize(
    ("changed", "said"), [({"torch": "1.0"}, "torch 1.0, now "), ({"driver": "570"}, "driver 570")]
)
def test_a_changed_machine_is_not_believed(
    make_probe: MakeProbe, hardware: Hardware, changed: dict[str, Any], said: str
) -> None:
    probe = make_probe()
    write_probe(dataclasses.replace(probe, identity=dataclasses.replace(probe.identity, **changed)))
    found, reason = read_probe(identity_of(hardware))
    assert found is None
    assert said in str(reason)


@pytest.mark.parametrize("changed", [{"cpu": "b"}, {"processors": 99}, {"cards": ("GPU-1",)}])
def test_other_machines_have_files_of_their_own(
    make_probe: MakeProbe, changed: dict[str, Any]
) -> None:
    identity = make_probe().identity
    assert file_of(dataclasses.replace(identity, **changed)) != file_of(identity)


def test_another_schema_is_not_believed(make_probe: MakeProbe, hardware: Hardware) -> None:
    path = write_probe(make_probe())
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"schema": 2}))
    found, reason = read_probe(identity_of(hardware))
    assert found is None
    assert "another version" in str(reason)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(-5, 5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_garbage_is_a_note(make_probe: MakeProbe, hardware: Hardware, data: st.DataObject) -> None:
    """Any bytes, and any JSON in the place of any part of a probe."""
    probe = make_probe()
    path = write_probe(probe)
    content: Any = json.loads(path.read_text())
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(st.binary(max_size=50)))
    else:
        part = data.draw(st.sampled_from(sorted(content)))
        content[part] = data.draw(JSON)
        path.write_text(json.dumps(content))
    found, reason = read_probe(identity_of(hardware))
    assert (found is None) == (reason is not None)
    if found is not None:  # what was put there is as good as what was there
        assert ADAPTER.validate_json(ADAPTER.dump_json(found)) == found
        for ranks in (1, 2, 3):
            assert rates_of(found, RankShare(torch.device("cpu"), "fp32", ranks, 1), hardware)


def test_a_folder_that_cannot_be_read_is_a_note(make_probe: MakeProbe, hardware: Hardware) -> None:
    path = file_of(make_probe().identity)
    path.mkdir(parents=True)
    found, reason = read_probe(identity_of(hardware))
    assert found is None
    assert str(path) in str(reason)


def test_nothing_is_left_where_it_cannot_be_kept(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(make_probe().identity)
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("in the way")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        write_probe(make_probe())
    assert Path(path.parent).read_text() == "in the way"
