"""The part of a model that one pipeline stage computes, as a config of its own."""

from __future__ import annotations

from transformers import PretrainedConfig

from tightfit.bill.shards import ceil_divide
from tightfit.dry_run.depth import with_depth
from tightfit.errors import UnsupportedError


def pipeline_slice(config: PretrainedConfig, stages: int) -> PretrainedConfig:
    """A stage with the most layers, and both ends.

    Raises:
        UnsupportedError: there are fewer layers than stages.
    """
    depth = config.num_hidden_layers
    if stages > depth:
        raise UnsupportedError(
            f"pipeline_parallel_size {stages} is more than the model's {depth} layers"
        )
    return config if stages == 1 else with_depth(config, ceil_divide(depth, stages))
