"""The default kernel of every architecture in the catalogue is what transformers supports."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.dry_run.config import load_config
from tightfit.engine.attention import supported_kernels
from tightfit.facts.attention import default_attention
from tightfit.facts.catalogue import catalogue_names
from tightfit.facts.model_spec import load_model_spec
from tightfit.policies import AttentionKernel

CONFIGS: dict[str, dict[str, Any]] = {
    config["model_type"]: config
    for config in (load_model_spec(n).config for n in catalogue_names())
}


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_the_default_is_sdpa_where_transformers_has_it(model_type: str) -> None:
    has = AttentionKernel.SDPA in supported_kernels(load_config(CONFIGS[model_type]))
    assert default_attention(CONFIGS[model_type]) == ("sdpa" if has else "eager")
