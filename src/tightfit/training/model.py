"""Opens a causal language model: its modules without values, and what fills them.

A checkpoint stored in another type is converted while it is read. Remote code is never run.
Does not know plans or data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.errors import ModelNotFoundError
from tightfit.facts.model_files import model_folder
from tightfit.training.weights import CheckpointWeights

_GENERATION_CONFIG = "generation_config.json"


def open_model(
    path: Path | str, dtype: torch.dtype, changed: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, CheckpointWeights]:
    """The model in `path`, a folder or a name that is in the Hub cache, on the meta device.

    Args:
        changed: fields of its config, of its text part, that are to be others: `vocab_size` for
            more rows of its embedding and output layer than it has, or rotary positions.

    Returns:
        The model, and what `fit` fills its parameters with.

    Raises:
        ModelNotFoundError: there are no weights.
        InputError: the weights are broken or those of another model.
    """
    ledger.set_phase(Phase.LOAD)
    folder = model_folder(str(path))
    config = AutoConfig.from_pretrained(folder)
    changed = changed or {}
    config.get_text_config().update(changed)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.name_or_path = config._name_or_path = str(path)
    if (folder / _GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, CheckpointWeights(folder, model, grown="vocab_size" in changed)


def check_weights(path: Path) -> None:
    """See that a model folder has weights, without reading them.

    Raises:
        ModelNotFoundError: it has none.
    """
    if path.is_dir() and not any(path.glob("*.safetensors")):
        pickled = " (its .bin files are pickles, which are never read)" * any(path.glob("*.bin"))
        raise ModelNotFoundError(f"no weights in {path}: it has no .safetensors file{pickled}")
