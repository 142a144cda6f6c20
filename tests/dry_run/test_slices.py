"""A stage's part of a model as a config of its own."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from tightfit.dry_run.slices import pipeline_slice
from tightfit.errors import UnsupportedError


def test_a_stage_has_its_layers() -> None:
    config = LlamaConfig(num_hidden_layers=6)
    assert pipeline_slice(config, 1) is config
    assert pipeline_slice(config, 4).num_hidden_layers == 2
    with pytest.raises(UnsupportedError, match="more than the model's 6 layers"):
        pipeline_slice(config, 7)
