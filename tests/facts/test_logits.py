"""Configs tell whether logits are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.facts.logits import logit_transform


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, None),
        ({"final_logit_softcapping": None, "logits_scaling": 1.0}, None),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"logit_scale": 0.0625}, "logit_scale"),
        ({"logits_scaling": 8}, "logits_scaling"),
    ],
)
def test_what_changes_logits_is_named(config: dict[str, Any], key: str | None) -> None:
    assert logit_transform(config) == key
