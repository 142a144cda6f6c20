"""State dicts of a model whose parameters' values are elsewhere, or on their way.

Whoever saves or loads a model calls `state_dict` and `load_state_dict` on it, or on a module of it,
as on any other. Knows nothing of what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tightfit.engine.streaming import ParameterStream


def serve_state_dicts(
    root: nn.Module, stream: ParameterStream | None, drain: Callable[[], None]
) -> None:
    """Make state dicts of `root`, and of modules in it, what they are without any placement.

    Args:
        stream: knows where values are that do not live on the device. Those on the disk are read
            into host memory, all that a state dict has: save module by module where that is too
            much.
        drain: called before anything is read or written; updates that wait are done then.
    """
    for module in root.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        module.register_state_dict_pre_hook(lambda *_: drain())
        module.register_load_state_dict_pre_hook(lambda *_: drain())
        if stream is not None:
            module.register_state_dict_post_hook(partial(_show_values, stream, own))
            module.register_load_state_dict_pre_hook(partial(_bring, stream, own))
            module.register_load_state_dict_post_hook(partial(_take_back, stream, own))


def _show_values(
    stream: ParameterStream,
    own: dict[str, nn.Parameter],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
) -> None:
    for name, parameter in own.items():
        if prefix + name in state_dict:
            values = stream.values_to_save(parameter)
            if values is not None:
                state_dict[prefix + name] = _like(parameter, values)


def _like(parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """What a state dict has for `parameter`: of a shard, a DTensor."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _bring(stream: ParameterStream, own: dict[str, nn.Parameter], *unused: Any) -> None:
    """torch copies into the parameters next."""
    for parameter in own.values():
        stream.bring(parameter)


def _take_back(stream: ParameterStream, own: dict[str, nn.Parameter], *unused: Any) -> None:
    for parameter in own.values():
        stream.take_back(parameter)
