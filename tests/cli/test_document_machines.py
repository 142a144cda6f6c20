"""The page of machines is the one that the tables make."""

from __future__ import annotations

from pathlib import Path

from tightfit.cli.document_machines import document
from tightfit.facts.presets import presets

PAGE = Path(__file__).parents[2] / "docs" / "machines.md"


def test_the_page_is_in_step() -> None:
    assert PAGE.read_text() == document(), "run: python -m tightfit.cli.document_machines"


def test_every_card_has_figures_and_sources_on_it() -> None:
    for card in presets():
        assert document().count(f"| `{card.key}` |") == 2
