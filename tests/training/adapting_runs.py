"""Runs on two real ranks that change their plan on the way, for test_adapting.py.

What decides is a clock, so the thresholds are set to what any clock is beyond; that the clock is
right is another test's business.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tightfit.facts.job import Job
from tightfit.ledger import Ledger
from tightfit.monitor import advice
from tightfit.monitor.changes import PlanChange
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.planner.plan import Plan
from tightfit.policies import Tier
from tightfit.training import adapting, leg, run
from tightfit.training.adapting import Adapting

STEPS = 2  # before anything is changed
RESULTS = "results.json"


class Said:
    """An observer that keeps what it is told of changes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, record: StepRecord) -> None:
        pass

    def evaluation(self, record: EvaluationRecord) -> None:
        pass

    def changed(self, change: PlanChange) -> None:
        self.said.append(str(change))


def run_and_adapt(
    job: Mapping[str, Any], plan: Plan, folder: Path, limits: Mapping[int, int]
) -> None:
    """Run a job with a plan whose advice is always followed, and write down what came of it.

    Args:
        limits: of the device of this rank with all plans but the first, by rank; others have none.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "MOST_COMMUNICATION", -1.0)
        for module in (advice, adapting):
            patch.setattr(module, "STEPS", STEPS)
        patch.setattr(
            leg, "Adapting", lambda job, plan, steps, seconds: Adapting(job, plan, steps, 0.0)
        )
        limit = limits.get(dist.get_rank())
        patch.setattr(
            leg,
            "enforced_bytes",
            lambda job, its: None if its.policies == plan.policies else limit,
        )
        left = _watch_memory(patch)
        prepared = run.prepare(Job(**{**job, "output_dir": str(folder)}))
        said = Said()
        result = run.train(prepared, plan, [said])
    if dist.get_rank() == 0:
        (folder / RESULTS).write_text(
            json.dumps(
                {
                    "steps": [record.to_json() for record in result.records],
                    "evaluations": [record.to_json() for record in result.evaluations],
                    "answers": result.answers,
                    "changes": [change.to_json() for change in result.changes],
                    "zero_stage": result.plan.policies.sharding.zero_stage,
                    "said": said.said,
                    "left": left,
                }
            )
        )


def _watch_memory(patch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What is left of each leg when its memory was given back, looked at before the next begins."""
    left: list[dict[str, int]] = []
    alive: list[weakref.ref[Any]] = []
    ledgers: list[Ledger] = []
    build, let_go = leg._build, run.let_go

    def remember(its_run: Any, plan: Any, watch: Any, observers: Any) -> Any:
        ledgers.append(watch.ledger)
        loop = build(its_run, plan, watch, observers)
        engine = loop.engine
        held = [loop, engine, engine.model, engine.optimizer, *engine.model.parameters()]
        alive.extend(weakref.ref(each) for each in held)
        return loop

    def look() -> None:
        let_go()
        device_bytes = ledgers[-1].total_bytes(Tier.DEVICE)
        objects = sum(ref() is not None for ref in alive)
        left.append({"device_bytes": device_bytes, "objects": objects, "held": len(alive)})
        alive.clear()

    patch.setattr(leg, "_build", remember)
    patch.setattr(run, "let_go", look)
    return left
