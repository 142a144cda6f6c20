"""Models that were built on the `meta` device, whose values come one parameter at a time.

So a model may be larger than memory: a parameter gets its values when it moves to where it will
live, and what it was filled in is given up before the next one comes; a rank that holds a part of
it asks for that part alone. Buffers that a model computes when it is built, such as tables of
positions, are computed again. Knows nothing of where values go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.regions import Region, boxes_of, whole
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.ledger import local_part
from tightfit.policies import Tier

Fill = Callable[[str, torch.Tensor, Region], None]


class Unloaded:
    """The parameters of a model that have no values yet; none of one that was loaded.

    Args:
        model: changed in place: its parameters are on `device` and have no memory, its buffers do.
        fill: called with a parameter's name, a tensor on the host to fill, and which region of the
            parameter that is, for each region of this rank's part. Buffers that are saved with the
            model are filled as well.

    Raises:
        UnsupportedError: a buffer cannot be computed.
        ConfigError: nobody fills them.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, fill: Fill | None) -> None:
        self._device = device
        self._names: dict[nn.Parameter, str] = {}
        self._places: list[tuple[nn.Module, str, str]] = []  # with the name of what is there
        self._memory: dict[int, torch.Tensor] = {}  # by storage, all of it: shards are padded
        if not is_unloaded(model):
            return
        if fill is None:
            raise ConfigError(
                "the model is on the meta device and has no values: load it, or say what fills its "
                "parameters (values)"
            )
        self._fill = fill
        make_buffers(model, device, fill)
        self._names = {p: name for name, p in model.named_parameters() if p.is_meta}
        self._places = [
            (module, own, self._names[parameter])
            for module in model.modules()
            for own, parameter in module.named_parameters(recurse=False)
            if parameter in self._names
        ]
        self._exchange(self._without_memory)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._names)

    @contextmanager
    def as_shapes(self, root: nn.Module) -> Iterator[None]:
        """Inside, parameters are on meta, so that they can be shared out by their shapes alone.

        Args:
            root: all of the model; afterwards its parameters are this rank's parts on the device.
        """
        self._exchange(lambda parameter: parameter.to("meta"))
        yield
        for module in root.modules() if self._names else ():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    self._make_shards(group)
        self._exchange(lambda p: self._without_memory(p) if p.is_meta else p)

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's values, of this rank's part: those it holds, or new ones on the host."""
        if parameter not in self._names:
            return local_part(parameter).data
        if isinstance(parameter, DTensor):  # whoever moves a shard away asks what it takes here
            self._give_memory(parameter)
        with ledger.labelled(Kind.TRANSFER, Tier.HOST):
            values = torch.empty(local_part(parameter).shape, dtype=parameter.dtype)
        with torch.no_grad():
            for box in boxes_of(parameter):
                self._fill(self._names[parameter], values[box.of_part], box.of_whole)
        return values

    def load_the_rest(self, has_moved: Callable[[nn.Parameter], bool]) -> None:
        """Give those that stay on the device their values."""
        for parameter in self._names:
            if not has_moved(parameter):
                self._give_memory(parameter)
                local_part(parameter).data.copy_(self.values(parameter))
                ledger.mark(parameter, Kind.PARAMETERS, Tier.DEVICE)

    def _give_memory(self, parameter: nn.Parameter) -> None:
        """What it has room for, which is more than its part where shards are padded."""
        memory = self._memory[local_part(parameter).untyped_storage()._cdata]
        memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        memory.zero_()

    def _exchange(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put what `make` gives for each parameter in its place, once for all places of it."""
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        self._names = {}  # parameters that were shared out are others, in the same places
        for module, own, name in self._places:
            old = getattr(module, own)
            if old is None:
                continue  # ranks that share a 4-bit weight keep it in fewer parts
            if old not in replaced:
                new = make(old)
                replaced[old] = new if new is old else nn.Parameter(new, old.requires_grad)
                self._names[replaced[old]] = name
            setattr(module, own, replaced[old])

    def _make_shards(self, group: FSDPParamGroup) -> None:
        """What FSDP2 makes of parameters that are on the device: shards with room for padding."""
        for shard in group.fsdp_params:
            if shard.sharded_param.is_meta:
                rows = shard.sharded_size[0] if shard.sharded_size.numel() else 0
                padded = self._empty(shard.padded_sharded_param_size, shard.sharded_param.dtype)
                shard._sharded_param_data = padded.view(-1)
                shard.sharded_param = nn.Parameter(
                    shard.to_sharded_dtensor(padded[:rows]), shard.sharded_param.requires_grad
                )
                shard._setattr_on_modules(shard.sharded_param)
                padded.untyped_storage().resize_(0)
        group._reset_sharded_params = True  # or it would pad them again, and read what is not there

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with ledger.labelled(Kind.PARAMETERS):
            empty = torch.empty(shape, dtype=dtype, device=self._device)
        self._memory[empty.untyped_storage()._cdata] = empty
        return empty

    def _without_memory(self, parameter: torch.Tensor) -> torch.Tensor:
        empty = self._empty(local_part(parameter).shape, parameter.dtype)
        empty.untyped_storage().resize_(0)
        if not isinstance(parameter, DTensor):
            return empty
        return DTensor.from_local(
            empty,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def is_unloaded(model: nn.Module) -> bool:
    """Whether a model was built on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def make_buffers(model: PreTrainedModel, device: torch.device, fill: Fill) -> None:
    """Give a model on the meta device its buffers on `device`: fill those that are saved with it,
    and compute the others as transformers does where a file that it reads does not have them.

    Raises:
        UnsupportedError: the model has one that it does not compute so.
    """
    saved = set(model.state_dict())
    for name, module in model.named_modules():
        own = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for key in own:
            setattr(module, key, _unset(getattr(module, key), device))
        if own:
            model._init_weights(module)
        for key in own:
            buffer, full_name = getattr(module, key), f"{name}.{key}" if name else key
            if full_name in saved:
                fill(full_name, buffer, whole(buffer))
            elif not _is_computed(buffer):
                raise UnsupportedError(
                    f"{full_name} of this model is not computed by its _init_weights: build the "
                    "model with its buffers on the host, or load it"
                )


def _unset(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A buffer on `device` that shows where nobody has filled it."""
    with ledger.labelled(Kind.BUFFERS):
        unset = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return unset.fill_(float("nan")) if unset.is_floating_point() else unset


def _is_computed(buffer: torch.Tensor) -> bool:
    """Whether somebody has filled what `_unset` gave; where no value could show that, such as in a
    mask, by whether it was written to."""
    if buffer.is_floating_point():
        return bool(buffer.isfinite().all())
    return buffer._version > 0
