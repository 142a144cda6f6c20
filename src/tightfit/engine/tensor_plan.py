"""Which style each module of a model has when a tensor group shares it, or why it cannot.

The plan is the model's own (`base_model_tp_plan` of its config, with what its class adds), and what
no plan names is whole on every rank. The input embedding and the output layer always share out the
vocabulary. Adapters go with the layer they are on: of a layer whose outputs are divided, B is, and
of one whose inputs are, A is. Knows nothing of tensors' values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tightfit.engine.layers import Absent
from tightfit.engine.quantisation import QuantisedLinear
from tightfit.errors import UnsupportedError

_LINEAR = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")
_EXPERTS = "moe_tp_experts"
_ALIGNED = 8  # 16-bit values: torch's grouped products want rows of whole 16 bytes
_OTHERS = ("embedding_rowwise", "replicated_with_grad_allreduce", _EXPERTS)
_PARTS_OF_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """The style of each module that has one, by its name in the model.

    Raises:
        UnsupportedError: the model has no plan, or one with a style that the engine does not know,
            or adapters on something else than linear layers, or layers that it leaves out although
            their inputs may be divided.
    """
    _check_adapters(model)
    if not model.config.get_text_config().base_model_tp_plan:
        raise UnsupportedError(
            f"a {model.config.model_type} model has no tensor-parallel plan in transformers; "
            "llama, qwen2, qwen3, mistral, gemma, phi3 and their like have one: set "
            "tensor_parallel_size 1 and use zero_stage 3"
        )
    rules = dict(model.tp_plan)
    patterns = {re.compile(re.escape(k).replace(r"\*", r"\d+")): s for k, s in rules.items()}
    plan = {}
    for name, module in model.named_modules():
        style = next((s for p, s in patterns.items() if p.fullmatch(name)), None)
        if style is not None and not isinstance(module, Absent):
            _check_style(model, name, module, style)
            plan[name] = style
    _check_parameters(model, plan, patterns)
    names = {module: name for name, module in model.named_modules()}
    ends = (
        (model.get_input_embeddings(), "embedding_rowwise"),
        (model.get_output_embeddings(), "colwise_gather_output"),
    )
    plan |= {names[end]: style for end, style in ends if not isinstance(end, Absent)}
    _check_the_rest(model, plan)
    return plan


def _check_adapters(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if not is_adapted(module):
            continue
        others = ("lora_embedding_A", "lora_magnitude_vector")
        plain = hasattr(module, "lora_A") and not any(len(getattr(module, k, ())) for k in others)
        if not (plain and isinstance(base_layer(module), nn.Linear)):
            raise UnsupportedError(
                f"the adapter of {name} is not plain LoRA on a linear layer, which is all that "
                "tensor-parallel ranks can share: name linear layers in lora_target (such as "
                "q_proj,k_proj,v_proj,o_proj), or set tensor_parallel_size 1"
            )


def _check_the_rest(model: PreTrainedModel, plan: dict[str, str]) -> None:
    """What is whole on every rank must see what is whole, or its gradient is a part unnoticed."""
    divide = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    planned = {base_layer(model.get_submodule(name)) for name in plan}
    for name, module in model.named_modules():
        beside = name.rpartition(".")[0] in divide and base_layer(module) not in planned
        if module._parameters and (beside or isinstance(module, nn.Conv1d)):
            raise UnsupportedError(
                f"the tensor-parallel plan of {model.config.model_type} does not say what becomes "
                f"of {name}, beside layers whose outputs are divided: set tensor_parallel_size 1 "
                "and use zero_stage 3"
            )


def _check_style(model: PreTrainedModel, name: str, module: nn.Module, style: str) -> None:
    kind = base_layer(module)
    fits = {
        **dict.fromkeys(_LINEAR, isinstance(kind, nn.Linear)),
        "embedding_rowwise": isinstance(kind, nn.Embedding),
        "replicated_with_grad_allreduce": True,
        _EXPERTS: {n for n, _ in kind.named_parameters()} == set(_PARTS_OF_EXPERTS),
    }
    if not fits.get(style, False):
        raise _unknown(model, name, style)


def _check_parameters(
    model: PreTrainedModel, plan: dict[str, str], patterns: dict[re.Pattern[str], str]
) -> None:
    """Plans name parameters too, of which only those of experts are known."""
    for name, _ in model.named_parameters():
        style = next((s for p, s in patterns.items() if p.fullmatch(name)), None)
        owner, _, own = name.rpartition(".")
        known = plan.get(owner) == _EXPERTS and _PARTS_OF_EXPERTS.get(own) == style
        if style is not None and not known:
            raise _unknown(model, name, style)


def _unknown(model: PreTrainedModel, name: str, style: str) -> UnsupportedError:
    known = ", ".join((*_LINEAR, *_OTHERS, "packed_colwise"))
    return UnsupportedError(
        f"the tensor-parallel plan of {model.config.model_type} says {style} for {name}, which the "
        f"engine cannot do (it knows {known}, the last two for experts only): set "
        "tensor_parallel_size 1 and use zero_stage 3"
    )


def check_sizes(model: PreTrainedModel, plan: dict[str, str], ranks: int) -> None:
    """See that `ranks` can share the model.

    Raises:
        UnsupportedError: heads, experts or blocks of 4-bit weights cannot be divided, naming
            numbers of ranks that can.
    """
    fitting = [n for n in range(1, 65) if not any(_reasons(model, plan, n))]
    reason = next(_reasons(model, plan, ranks), None)
    if reason is not None:
        raise UnsupportedError(
            f"tensor_parallel_size {ranks}: {reason}; this model can be shared by "
            f"{', '.join(map(str, fitting))}"
        )


def _reasons(model: PreTrainedModel, plan: dict[str, str], ranks: int) -> Iterator[str]:
    for name, style in plan.items():
        module: Any = model.get_submodule(name)
        if style == _EXPERTS and module.down_proj.shape[2] % (ranks * _ALIGNED):
            inner = module.down_proj.shape[2]
            yield f"experts' inner width {inner} is not so many parts of multiples of {_ALIGNED}"
        if style == "colwise" and name.endswith((".q_proj", ".k_proj")):
            heads = heads_of(model, name)
            queries = heads_of(model, re.sub(r"\bk_proj$", "q_proj", name))
            if heads % ranks and (name.endswith(".q_proj") or ranks % heads or queries % ranks):
                kind = "query" if name.endswith(".q_proj") else "key and value"
                yield f"it does not divide the model's {heads} {kind} heads"
        layer = base_layer(module)
        if isinstance(layer, QuantisedLinear):
            rows, columns = layer.out_features, layer.in_features
            inputs = ranks if style.startswith("rowwise") else 1
            if rows % (ranks // inputs) or columns % (inputs * layer.policy.block):
                block = f"a block of {layer.policy.block} weights"
                yield f"it would cut {name}, {rows} x {columns}, through {block}"


def heads_of(model: PreTrainedModel, name: str) -> int:
    """Heads of the keys, values or queries that the layer `name` makes."""
    config: Any = model.config.get_text_config()
    if name.endswith(".q_proj"):
        return int(config.num_attention_heads)
    return int(base_layer(model.get_submodule(name)).out_features) // head_size(model, name)


def head_size(model: PreTrainedModel, name: str) -> int:
    """Width of a head of the attention that has the layer `name`."""
    config: Any = model.config.get_text_config()
    attention = model.get_submodule(name.rpartition(".")[0])
    found = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def base_layer(module: Any) -> Any:
    """The layer itself where adapters are around it."""
    return module.base_layer if is_adapted(module) else module


def is_adapted(module: nn.Module) -> bool:
    """Whether peft has put adapters around a layer; asked without importing it."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)
