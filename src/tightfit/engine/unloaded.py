"""Models that were built on the `meta` device, whose values come one parameter at a time.

So a model may be larger than memory: a parameter gets its values when it moves to where it will
live, and what it was filled in is given up before the next one comes. Buffers that a model computes
when it is built, such as tables of positions, are computed again. Knows nothing of where values go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.ledger import local_part
from tightfit.policies import Policies, Tier

Fill = Callable[[str, torch.Tensor], None]


class Unloaded:
    """The parameters of a model that have no values yet; none of one that was loaded.

    Args:
        model: changed in place: its parameters are on `device` and have no memory, its buffers do.
        fill: called with a parameter's name and a tensor on the host to fill.

    Raises:
        UnsupportedError: the policies look at values, or a buffer cannot be computed.
        ConfigError: nobody fills them.
    """

    def __init__(
        self, model: PreTrainedModel, policies: Policies, device: torch.device, fill: Fill | None
    ) -> None:
        self._names: dict[nn.Parameter, str] = {}
        if not is_unloaded(model):
            return
        _check(policies)
        if fill is None:
            raise ConfigError(
                "the model is on the meta device and has no values: load it, or say what fills its "
                "parameters (values)"
            )
        self._fill = fill
        self._names = _replace_parameters(model, device)
        _compute_buffers(model, device)

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's values: those it holds, or new ones on the host."""
        if parameter not in self._names:
            return local_part(parameter).data
        with ledger.labelled(Kind.TRANSFER, Tier.HOST):
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
        with torch.no_grad():
            self._fill(self._names[parameter], values)
        return values

    def load_the_rest(self, has_moved: Callable[[nn.Parameter], bool]) -> None:
        """Give those that stay on the device their values."""
        for parameter in self._names:
            if not has_moved(parameter):
                storage = parameter.untyped_storage()
                storage.resize_(parameter.numel() * parameter.element_size())
                parameter.data.copy_(self.values(parameter))
                ledger.mark(parameter, Kind.PARAMETERS, Tier.DEVICE)


def is_unloaded(model: nn.Module) -> bool:
    """Whether a model was built on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def _check(policies: Policies) -> None:
    looking = {
        "a quantised base": policies.quantisation is not None,
        "several ranks": policies.sharding.ranks > 1,
    }
    wrong = [name for name, used in looking.items() if used]
    if wrong:
        raise UnsupportedError(
            f"a model on the meta device cannot be made ready for {' and '.join(wrong)}, which "
            "needs its values: load it first"
        )


def _replace_parameters(model: nn.Module, device: torch.device) -> dict[nn.Parameter, str]:
    """Parameters on `device` without memory in place of those on meta; the same for tied ones."""
    names = {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            with ledger.labelled(Kind.PARAMETERS):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            empty.untyped_storage().resize_(0)
            replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            names[replaced[parameter]] = name
    for module in model.modules():
        for own, old in list(module.named_parameters(recurse=False)):
            if old in replaced:
                setattr(module, own, replaced[old])
    return names


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """As transformers does where it has read a file that does not have them.

    Raises:
        UnsupportedError: the model has one that it does not compute so.
    """
    for name, module in model.named_modules():
        own = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for key in own:
            setattr(module, key, _unset(getattr(module, key), device))
        if own:
            model._init_weights(module)
        for key in own:
            buffer = getattr(module, key)
            if not buffer.is_floating_point() or bool(buffer.isnan().any()):
                raise UnsupportedError(
                    f"{name}.{key} of this model is not computed by its _init_weights: build the "
                    "model with its buffers on the host, or load it"
                )


def _unset(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A buffer on `device` that shows where nobody has filled it."""
    with ledger.labelled(Kind.BUFFERS):
        unset = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return unset.fill_(float("nan")) if unset.is_floating_point() else unset
