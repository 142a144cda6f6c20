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
from planning_cases import CLUSTERS, CONSUMER, RULES, Rule, from_json  # noqa: E402
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


def of(rule: Rule) -> Any:
    """The rule as a test's parameter."""
    fails = [pytest.mark.xfail(reason=rule.but, strict=True)] if rule.but else []
    return pytest.param(rule, id=re.sub(r"\W+", " ", rule.said)[:60], marks=fails)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [of(rule) for rule in RULES])
def test_a_rule_comes_out(rule: Rule, plans: dict[str, Any]) -> None:
    for keys in rule.jobs:
        if name_of(keys) not in plans:
            plans[name_of(keys)] = planned(keys)
    found = [plans[name_of(keys)][0] for keys in rule.jobs]
    assert rule.comes_out(*found), [plans[name_of(keys)][1]["plan"] for keys in rule.jobs]


def test_the_rules_that_do_not_come_out_are_those_that_are_said() -> None:
    """By the plans that were made last."""
    rows = json.loads(RESULTS.read_text())["jobs"]
    for rule in RULES:
        found = [from_json(rows[name_of(keys)]["found"]) for keys in rule.jobs]
        assert rule.comes_out(*found) is not bool(rule.but), rule.said


def test_every_job_is_one() -> None:
    assert (len(CONSUMER), len(CLUSTERS)) == (8, 4)
    for keys in all_jobs():
        assert Job(**keys).gpu


def test_the_page_is_that_of_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    assert results["jobs"].keys() <= {name_of(keys) for keys in all_jobs()}
    assert PAGE.read_text() == filled(PAGE.read_text(), results)
