"""How many parameters each family of decoders has: one small function per family.

The formulas follow the modules of transformers 5.24; `tests/facts/test_parameter_count.py` holds
each against the model that transformers builds. Knows neither files nor names of models.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.facts.config_fields import ConfigFields
from tightfit.facts.families import classic, gated, sparse
from tightfit.facts.parameter_count import ParameterCounts

_FAMILIES: dict[str, Callable[[ConfigFields], ParameterCounts]] = {
    "bloom": classic.bloom,
    "cohere": gated.cohere,
    "cohere2": gated.cohere,
    "deepseek_v2": sparse.deepseek_v2,
    "deepseek_v3": sparse.deepseek_v3,
    "falcon": classic.falcon,
    "gemma": gated.gemma,
    "gemma2": gated.gemma2,
    "gemma3_text": gated.gemma3,
    "glm": gated.glm,
    "glm4": gated.glm4,
    "gpt2": classic.gpt2,
    "gpt_bigcode": classic.gpt_bigcode,
    "gpt_neo": classic.gpt_neo,
    "gpt_neox": classic.gpt_neox,
    "gpt_oss": sparse.gpt_oss,
    "gptj": classic.gptj,
    "granite": gated.llama,
    "granitemoe": sparse.granitemoe,
    "llama": gated.llama,
    "ministral3": gated.mistral,
    "mistral": gated.mistral,
    "mixtral": sparse.mixtral,
    "mpt": classic.mpt,
    "olmo": gated.olmo,
    "olmo2": gated.olmo2,
    "olmo3": gated.olmo2,
    "olmoe": sparse.olmoe,
    "opt": classic.opt,
    "phi": classic.phi,
    "phi3": gated.phi3,
    "phimoe": sparse.phimoe,
    "qwen2": gated.qwen2,
    "qwen2_moe": sparse.qwen2_moe,
    "qwen3": gated.qwen3,
    "qwen3_moe": sparse.qwen3_moe,
    "smollm3": gated.llama,
    "stablelm": gated.stablelm,
    "starcoder2": classic.starcoder2,
}


def count_parameters(fields: ConfigFields) -> ParameterCounts | None:
    """The counts of the causal language model; None for families without a closed form.

    Raises:
        InputError: a field is missing or makes no sense.
    """
    family = _FAMILIES.get(fields.model_type)
    return None if family is None else family(fields)


def closed_form_families() -> list[str]:
    """The model types that `count_parameters` knows."""
    return list(_FAMILIES)
