"""Loads a causal language model onto its device, in the type it trains in.

A checkpoint stored in another type is converted while it is read. Remote code is never run.
Does not know plans or data.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.errors import InputError, ModelNotFoundError
from tightfit.policies import Tier

_NAMED_TENSORS = 3  # how many missing tensors a message lists


def load_model(
    path: Path | str, dtype: torch.dtype, device: torch.device, *, stays_on_host: bool = False
) -> PreTrainedModel:
    """The model in `path`, a folder or a name that is in the Hub cache.

    Args:
        stays_on_host: leave it there, as its parameters are not to live on the device.

    Raises:
        ModelNotFoundError: there are no weights.
        InputError: the weights are broken or those of another model.
    """
    ledger.set_phase(Phase.LOAD)
    on_host = ledger.labelled(Kind.PARAMETERS, Tier.HOST) if stays_on_host else nullcontext()
    try:
        with on_host:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with a message
            )
    except OSError as error:
        raise ModelNotFoundError(
            f"no weights of a causal language model in {path}: {error}"
        ) from None
    except SafetensorError as error:
        raise InputError(f"the weights in {path} are broken: {error}; get them again") from None
    model, loading = loaded
    mismatched = {name for name, *_ in loading["mismatched_keys"]}
    _check_complete(path, sorted(mismatched | set(loading["missing_keys"])))
    assert isinstance(model, PreTrainedModel)
    if not stays_on_host:
        model.to(device)  # type: ignore[arg-type]
    counting = ledger.active()
    if counting is not None:
        counting.adopt(model, Tier.HOST if stays_on_host else None)
    return model


def check_weights(path: Path) -> None:
    """See that a model folder has weights, without reading them.

    Raises:
        ModelNotFoundError: it has none.
    """
    if path.is_dir() and not any(path.glob("*.safetensors")):
        pickled = " (its .bin files are pickles, which are never read)" * any(path.glob("*.bin"))
        raise ModelNotFoundError(f"no weights in {path}: it has no .safetensors file{pickled}")


def _check_complete(path: Path | str, missing: list[str]) -> None:
    """Transformers fills what is missing with random numbers; nobody wants to train those."""
    if missing:
        names = ", ".join(missing[:_NAMED_TENSORS])
        raise InputError(
            f"the weights in {path} are not those of its config.json: "
            f"{len(missing)} tensors are missing or of another shape, such as {names}"
        )
