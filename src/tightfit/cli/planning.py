"""One line about what a planner works out, where somebody watches: planning may take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from tightfit.planner.pricing import Observe, nobody
from tightfit.planner.words import describe_policies
from tightfit.policies import Policies


@contextmanager
def planning_status(console: Console | None = None) -> Iterator[Observe]:
    """Inside, whatever the planner tells is on one line of stderr, which is gone afterwards.

    Nothing is written where stderr is no terminal.

    Args:
        console: instead of stderr.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield nobody
        return
    with console.status("planning") as status:

        def observe(policies: Policies) -> None:
            status.update(Text(f"planning: {describe_policies(policies)}", overflow="ellipsis"))

        yield observe
