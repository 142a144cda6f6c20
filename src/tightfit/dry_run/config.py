"""From the content of a config.json to a config of transformers, and from that to a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tightfit.errors import InputError, UnsupportedError

# What transformers raises, somewhere inside, on values that it does not check.
_BAD_VALUE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    AssertionError,
    ZeroDivisionError,
    RuntimeError,
    IndexError,
)


def load_config(config: dict[str, Any]) -> PretrainedConfig:
    """A transformers config from the content of a config.json, which transformers would write to.

    Raises:
        InputError: transformers does not accept a value of it.
        UnsupportedError: transformers has no causal language model of this type.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type {model_type!r} is unknown to transformers {transformers.__version__}; "
            "install a newer one, or name another model (code from a model folder is never run)"
        )
    fields = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    try:
        loaded = AutoConfig.for_model(model_type, **fields)
    except (StrictDataclassError, *_BAD_VALUE) as error:
        raise InputError(f"config.json of a {model_type} model: {_one_line(error)}") from None
    if type(loaded) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(loaded, "num_hidden_layers"):
        raise UnsupportedError(
            f"model_type {model_type!r} is not that of a causal language model of text alone; "
            "name the text part of a model that has several"
        )
    return loaded


def transformers_config(config: Mapping[str, Any] | PretrainedConfig) -> PretrainedConfig:
    """A config as transformers has it, from the content of a config.json or as it is.

    Raises:
        InputError, UnsupportedError: as `load_config`.
    """
    return load_config(dict(config)) if isinstance(config, Mapping) else config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def build_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config, with whatever was in memory for weights.

    Raises:
        InputError: transformers cannot build it.
    """
    try:
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype
            )
        model.tie_weights()  # otherwise a part of what was left out
    except _BAD_VALUE as error:
        raise InputError(
            f"config.json of a {config.model_type} model: transformers cannot build it: "
            f"{_one_line(error)}"
        ) from error
    return model
