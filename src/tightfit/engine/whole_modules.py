"""Whole modules that are trained beside adapters: embedding, output layer, norms.

peft calls them `modules_to_save` and trains a copy of each. Here the module itself is trained, so
that nothing is there twice, and what is tied stays tied: naming one end of a tied model trains the
matrix that both ends are, and both are saved. Parameters are fp32, as adapters are, on a base of
any type; a module of a 16-bit base computes in the base's type. peft reads what is saved as its
own. Knows nothing of other techniques.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.layers import Absent
from tightfit.engine.quantisation import QuantisedLinear
from tightfit.engine.tensor_plan import is_adapted
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import AdapterPolicy

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name


def check_whole_modules(
    model: PreTrainedModel, policy: AdapterPolicy | None, stages: int = 1
) -> None:
    """See that the model, which is whole, has what the policy names, before anything is made or
    read for it.

    Args:
        stages: of a pipeline.

    Raises:
        ConfigError: a name is that of no module.
        UnsupportedError: it is that of a list, which computes nothing itself, or of what two stages
            have, neither of which would save it under both names.
    """
    if policy is None:
        return
    ends = _ends(model)
    if (
        stages > 1
        and _are_tied(ends)
        and _found(model, policy.modules_to_save).keys() & ends.keys()
    ):
        raise UnsupportedError(
            f"additional_target: {' and '.join(ends)} are one matrix, which two pipeline stages "
            "have: leave it out there, or set pipeline_parallel_size 1 and use zero_stage 3"
        )
    for name in policy.modules_to_save:
        found = _found(model, [name])
        if not found:
            raise ConfigError(
                f"additional_target {name}: no such module in the model; its embedding and output "
                f"layer are {' and '.join(ends)}; what gets adapters is named by lora_target"
            )
        for path, module in found.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise UnsupportedError(
                    f"additional_target {name}: {path} is a list of modules, which peft cannot "
                    f"load as one: name a module in it, such as {path}.0"
                )


def check_trains_ends(model: PreTrainedModel, policy: AdapterPolicy | None) -> None:
    """See that embedding and output layer, which have rows of new tokens, are trained.

    Raises:
        ConfigError: adapters leave one of them frozen.
    """
    if policy is None:
        return
    trained = set(_parameters(_found(model, policy.modules_to_save).values()))
    for path, end in _ends(model).items():
        if end.get_parameter("weight") not in trained:
            raise ConfigError(
                f"resize_vocab: the rows of new tokens in {path} would stay as they are: add "
                f"{path.rpartition('.')[2]} to additional_target"
            )


def widen(model: PreTrainedModel, policy: AdapterPolicy | None) -> None:
    """Make the parameters of whole modules fp32, before they have values, and their forwards
    compute in the type that they had.

    Raises:
        UnsupportedError: a module is of 4 bits.
    """
    if policy is None:
        return
    modules = _found(model, policy.modules_to_save)
    for path, module in modules.items():
        if any(isinstance(inner, QuantisedLinear) for inner in module.modules()):
            raise UnsupportedError(
                f"additional_target: {path} has linear layers, which quantization_bit: 4 freezes: "
                "name them in lora_target, or leave quantization_bit out"
            )
    wide: dict[torch.Tensor, nn.Parameter] = {}
    for parameter in _parameters(modules.values()):
        if parameter.dtype in (torch.bfloat16, torch.float16):
            with ledger.labelled(Kind.PARAMETERS):
                wide[parameter] = nn.Parameter(parameter.detach().float())
    for module in model.modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p in wide}
        for name, parameter in own.items():
            setattr(module, name, wide[parameter])
        if own:
            _compute_in(next(iter(own.values())).dtype, module, tuple(own))


def train_whole(adapted: nn.Module, model: PreTrainedModel, policy: AdapterPolicy) -> None:
    """Train what the policy names, and have it saved as peft does.

    Args:
        adapted: peft's model, in which `model` has its adapters and is frozen.

    Raises:
        UnsupportedError: a module has adapters too.
    """
    modules = _found(model, policy.modules_to_save)
    if not modules:
        return
    for path, module in modules.items():
        if any(is_adapted(inner) for inner in module.modules()):
            raise UnsupportedError(
                f"additional_target: {path} would be trained whole and have adapters: leave it out "
                "there, or name other layers in lora_target"
            )
        module.requires_grad_(True)
    ends = _ends(model)
    trained = [path for path, end in ends.items() if end.get_parameter("weight").requires_grad]
    peft_model: Any = adapted
    config = peft_model.peft_config["default"]
    others = [path.rpartition(".")[2] for path in trained if path not in modules]
    config.modules_to_save = [*policy.modules_to_save, *others]
    config.ensure_weight_tying = bool(trained) and _are_tied(ends)  # peft makes one copy for both
    peft_model.save_pretrained = partial(_save_with_modules, adapted, peft_model.save_pretrained)


def whole_parameters(adapted: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained beside adapters, by the names that peft's files have: tied ones twice."""
    named = adapted.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if p.requires_grad and ".lora_" not in name}


def _save_with_modules(
    adapted: nn.Module, save: Callable[..., None], folder: str | Path, **named: Any
) -> None:
    """peft's `save_pretrained`, which knows no module but the copies that it makes itself."""
    save(folder, **named)
    values = adapted.state_dict()
    path = Path(folder) / ADAPTER_FILE
    whole = {name: values[name].contiguous().clone() for name in whole_parameters(adapted)}
    save_file({**load_file(path), **whole}, path, {"format": "pt"})


def _found(model: PreTrainedModel, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that peft would find by these names, which are ends of paths (`norm` is each
    `input_layernorm` too), by their paths; not those that another stage of a pipeline has."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path and path.endswith(tuple(names)) and not isinstance(module, Absent)
    }


def _ends(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The embedding and the output layer by their paths, those that are here."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    return {p: m for p, m in model.named_modules() if m in ends and not isinstance(m, Absent)}


def _are_tied(ends: Mapping[str, nn.Module]) -> bool:
    return len({end.get_parameter("weight") for end in ends.values()}) < len(ends)


def _parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, None]:
    """Each once, in order."""
    return dict.fromkeys(parameter for module in modules for parameter in module.parameters())


def _compute_in(dtype: torch.dtype, module: nn.Module, names: tuple[str, ...]) -> None:
    """Have `module`'s forward see its parameters of these names in `dtype`; gradients are fp32."""
    plain = module.forward

    def forward(*given: Any, **named: Any) -> Any:
        with _seen_in(dtype, module, names):
            return plain(*given, **named)

    module.forward = forward


@contextmanager
def _seen_in(dtype: torch.dtype, module: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Inside, these parameters of `module`, or what somebody else shows in their place (a tensor
    rank's part), are in `dtype`."""
    parameters = dict(module._parameters)
    shown: Mapping[str, Any] = {n: module.__dict__[n] for n in names if n in module.__dict__}
    for name in names:
        wide = getattr(module, name)
        module._parameters.pop(name, None)
        object.__setattr__(module, name, None if wide is None else wide.to(dtype))
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]
        module.__dict__.update(shown)
        module._parameters.clear()
        module._parameters.update(parameters)
