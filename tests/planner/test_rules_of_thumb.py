"""The field's rules of thumb come out of the planner, and its page is that of its results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name

from planning import PAGE, RESULTS, all_jobs, name_of, planned  # noqa: E402
from planning_cases import CLUSTERS, CONSUMER, RULES, Rule  # noqa: E402
from planning_page import filled  # noqa: E402
from tightfit.engine.supported import engine_lacks  # noqa: E402
from tightfit.facts.job import Job  # noqa: E402
from tightfit.planner import fitting  # noqa: E402


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, not that of the other tests."""
    monkeypatch.setattr(fitting, "engine_lacks", engine_lacks)


@pytest.fixture(scope="session")
def plans() -> dict[str, Any]:
    """What became of the jobs so far: some are in several rules."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: re.sub(r"\W+", " ", rule.said)[:60])
def test_a_rule_comes_out(rule: Rule, plans: dict[str, Any]) -> None:
    for keys in rule.jobs:
        if name_of(keys) not in plans:
            plans[name_of(keys)] = planned(keys)
    found = [plans[name_of(keys)][0] for keys in rule.jobs]
    assert rule.comes_out(*found), [plans[name_of(keys)][1]["plan"] for keys in rule.jobs]


def test_every_job_is_one() -> None:
    assert (len(CONSUMER), len(CLUSTERS)) == (8, 4)
    for keys in all_jobs():
        assert Job(**keys).gpu


def test_the_page_is_that_of_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    assert results["jobs"].keys() <= {name_of(keys) for keys in all_jobs()}
    assert PAGE.read_text() == filled(PAGE.read_text(), results)
