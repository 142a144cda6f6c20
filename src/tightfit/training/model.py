"""Loads a causal language model onto its device, in the type it trains in.

A checkpoint stored in another type is converted while it is read. Remote code is never run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.errors import ModelNotFoundError


def load_model(path: Path | str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in `path`, a folder or a name that is in the Hub cache.

    Raises:
        ModelNotFoundError: there are no weights.
    """
    ledger.set_phase(Phase.LOAD)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        )
    except OSError as error:
        raise ModelNotFoundError(
            f"no weights of a causal language model in {path}: {error}"
        ) from None
    model.to(device)  # type: ignore[arg-type]
    counting = ledger.active()
    if counting is not None:
        counting.adopt(model)
    return model
