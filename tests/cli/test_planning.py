"""Who watches a planner sees what it works out; a file or a pipe sees nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tightfit.cli.planning import planning_status
from tightfit.policies import BatchPolicy, Policies


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_worked_out_is_shown_on_a_terminal_alone(terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=60)
    with planning_status(console) as observe:
        for micro in (4, 2, 1):
            observe(Policies(batch=BatchPolicy(micro, 4 // micro)))
    shown = screen.getvalue()
    assert bool(shown) is terminal
    assert ("planning: micro-batch 1 x 4" in shown) is terminal
