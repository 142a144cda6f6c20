"""Of long lists of cases, some for every day; the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Each `nth` as it is, the others for the long proof (`pytest -m slow`)."""
    return [case if number % nth == 0 else _slow(case) for number, case in enumerate(cases)]


def only(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """A few as they are, the others for the long proof."""
    few = list(few)
    return [case if case in few else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
