"""Of long lists of cases, some for every day; the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Each `nth` as it is, the others for the long proof (`pytest -m slow`)."""
    return [case if number % nth == 0 else _slow(case) for number, case in enumerate(cases)]


def only(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """A few as they are, the others for the long proof."""
    few = list(few)
    return [case if case in few else _slow(case) for case in cases]


def chequered(*lists: Iterable[Any]) -> list[Any]:
    """All combinations; for every day every second in each list, like the white squares of a board:
    of three lists each pair is among them, of two each value with half of the other list."""
    pairs = product(*(enumerate(values) for values in lists))
    cases = [(sum(n for n, _ in pair), tuple(value for _, value in pair)) for pair in pairs]
    return [case if places % 2 == 0 else _slow(case) for places, case in cases]


def asked_for(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Values that parameters of these names have in those tests of the module that are to run, each
    once; of several names tuples."""
    asked: dict[Any, None] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            found = getattr(item, "callspec", None)
            if found is not None and set(names) <= found.params.keys():
                values = tuple(found.params[name] for name in names)
                asked[values if len(names) > 1 else values[0]] = None
    return list(asked)


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
