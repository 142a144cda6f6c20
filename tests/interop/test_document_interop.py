"""The page of keys is made from the tables that readers use."""

from __future__ import annotations

from pathlib import Path

from tightfit.interop.document_interop import document

PAGE = Path(__file__).parent.parent.parent / "docs" / "interop.md"


def test_the_page_is_in_step_with_the_tables() -> None:
    made = document()
    assert PAGE.read_text(encoding="utf-8") == made, (
        "run `python -m tightfit.interop.document_interop > docs/interop.md`"
    )
    for key in (
        "zero_optimization.stage3_param_persistence_threshold",
        "HYBRID_SHARD",
        "flash_attn",
    ):
        assert f"`{key}`" in made
