"""What benchmarks/sharding.py makes of its measurements, and that its page is that of them."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name

with warnings.catch_warnings():  # torch's own optimizers for ranks call what torch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from sharding import RESULTS, merged
    from sharding_contenders import MODES
    from sharding_page import aims, page

MODE = MODES[3]
OURS, DEEPSPEED, FSDP = MODE.ours.name, *(peer.name for peer in MODE.peers)


def measured(seconds: list[float], device: list[int], losses: list[float]) -> dict[str, Any]:
    """A contender of two ranks whose rounds have one step each."""
    parts = {"forward": 0.25, "backward": 0.5, "step": 0.25, "waited": 0.0, "processor": 0.8}
    steps = [{name: part * s for name, part in parts.items()} for s in seconds]
    return {
        "rounds": [[step] for step in steps],
        "memory": [{"device": count, "process": 2 * count} for count in device],
        "losses": [losses, losses],
    }


def found(contenders: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {aim.what: (aim.found, aim.reached) for aim in aims(MODE, contenders)}


def test_each_aim_is_held_against_each_peer() -> None:
    contenders = {
        OURS: measured([1.0, 3.0, 1.0], [70, 80], [2.0, 1.5]),
        DEEPSPEED: measured([2.0, 2.0, 2.0], [100, 100], [2.0, 1.5]),
        FSDP: measured([0.9, 2.7, 0.5], [80, 60], [2.0, 1.5003]),
    }
    results = found(contenders)
    assert results[f"step / {DEEPSPEED}"] == ("0.50 (0.50 - 1.50)", True)
    assert results[f"step / {FSDP}"] == ("1.11 (1.11 - 2.00)", False)
    assert results[f"processor / {FSDP}"] == ("1.11 (1.11 - 2.00)", False)
    assert results[f"device bytes / {DEEPSPEED}"] == ("0.800", True)
    assert results[f"device bytes / {FSDP}"] == ("1.000", False), "as much is not less"
    (_, same) = next(value for what, value in results.items() if "loss" in what)
    assert not same, "a loss differs by 2e-4"


def test_who_did_not_run_is_no_peer() -> None:
    ours = measured([1.0], [1], [2.0])
    results = found({OURS: ours, DEEPSPEED: {"failed": "not here"}, FSDP: ours})
    assert not any(DEEPSPEED in what for what in results)
    assert all(f"{what} / {FSDP}" in results for what in ("step", "device bytes"))
    assert not found({OURS: {"failed": "why"}, DEEPSPEED: ours, FSDP: ours})


def test_a_new_measurement_takes_the_place_of_the_old() -> None:
    old = [{"name": "2 ranks, ZeRO-1", "at": 1}, {"name": "4 ranks, ZeRO-3", "at": 1}]
    again = merged(old, {"name": "2 ranks, ZeRO-1", "at": 2})
    more = merged(again, {"name": "2 ranks, ZeRO-3", "at": 2})
    assert [(result["name"], result["at"]) for result in more] == [
        ("2 ranks, ZeRO-1", 2),
        ("2 ranks, ZeRO-3", 2),
        ("4 ranks, ZeRO-3", 1),
    ]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_contenders_can_be_sent_to_other_processes(mode: Any) -> None:
    for contender in (mode.ours, *mode.peers):
        assert pickle.loads(pickle.dumps(contender)).name == contender.name


def test_page_is_that_of_the_results() -> None:
    results = json.loads((RESULTS / "sharding.json").read_text(encoding="utf-8"))
    assert (RESULTS / "sharding.md").read_text(encoding="utf-8") == page(results)
