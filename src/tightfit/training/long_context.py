"""Sequences longer than a model was made for: refused, said, or its rotary positions scaled.

The three ways to scale are transformers' own; here is only said by how much. Knows neither files
nor weights.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PretrainedConfig

from tightfit.errors import ConfigError
from tightfit.facts.config_checks import check_length
from tightfit.facts.job import Job
from tightfit.facts.model_spec import ModelSpec


def scaled_positions(job: Job, spec: ModelSpec, config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config that `rope_scaling` changes so that `cutoff_len` tokens are within its
    positions; none where the job does not ask for it or they are. The factor is the next whole
    number, as in LLaMA-Factory.

    `dynamic` (NTK) begins to scale beyond `max_position_embeddings`, which stays; `linear` and
    `yarn` (https://arxiv.org/abs/2309.00071) scale from the first token.

    Raises:
        ConfigError: the model has no rotary positions to scale, or scales its own already.
        InputError: it has a table of positions that ends before.
    """
    if job.rope_scaling is None or check_length(spec, job.cutoff_len) is None:
        return {}
    text = config.get_text_config()
    rope, positions = getattr(text, "rope_parameters", None), int(text.max_position_embeddings)
    if not rope or "rope_theta" not in rope:
        raise ConfigError(
            f"rope_scaling: a {text.model_type} model does not rotate all its layers by one base; "
            f"leave it out and set cutoff_len to {positions} or less"
        )
    own = rope.get("rope_type", "default")
    if own == job.rope_scaling == "dynamic" and rope["factor"] * positions >= job.cutoff_len:
        return {}
    if own != "default":
        raise ConfigError(
            f"rope_scaling {job.rope_scaling}: the model scales its positions already ({own}), to "
            f"{positions}; leave it out and set cutoff_len to that or less"
        )
    factor = math.ceil(job.cutoff_len / positions)
    scaled = {**rope, "rope_type": job.rope_scaling, "factor": float(factor)}
    if job.rope_scaling == "dynamic":
        return {"rope_parameters": scaled}
    if job.rope_scaling == "yarn":
        scaled["original_max_position_embeddings"] = positions
    return {"rope_parameters": scaled, "max_position_embeddings": factor * positions}
