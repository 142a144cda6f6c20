"""tightfit trains language models that do not fit.

The few names for people with a training loop of their own; see docs/python.md. They are imported
when they are used, so that `import tightfit` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightfit.api import fit, plan
    from tightfit.engine.engine import Engine
    from tightfit.facts.hardware import Hardware
    from tightfit.facts.workload import Workload
    from tightfit.ledger import Ledger
    from tightfit.planner.plan import Plan

__all__ = ["Engine", "Hardware", "Ledger", "Plan", "Workload", "fit", "plan"]

_HOMES = {
    "Engine": "tightfit.engine.engine",
    "Hardware": "tightfit.facts.hardware",
    "Ledger": "tightfit.ledger",
    "Plan": "tightfit.planner.plan",
    "Workload": "tightfit.facts.workload",
    "fit": "tightfit.api",
    "plan": "tightfit.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
