"""What lets a program written for real tensors run on fake ones.

A mode (`fake_mode.py`) gives every tensor a shape and no storage. Where a program asks for what
only real values tell, or moves a module, it gets the answer that a real run would get.
Knows nothing of engines or bills.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers.masking_utils
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from tightfit.dry_run.fake_mode import QuickFakes


@contextmanager
def fake_tensors() -> Iterator[QuickFakes]:
    """Every tensor made inside is a fake one; gives the mode that makes it so."""
    with _no_packing_check(), _no_module_moves(), _real_meshes(), QuickFakes() as mode:
        yield mode


def make_fake(model: nn.Module) -> None:
    """Put fake tensors, on the meta device too, in place of a model's on the meta device.

    It is built without fakes, since a module may make a tensor of a number, which torch 2.13
    does not fake on the meta device.
    """
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if tensor not in replaced:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[tensor] = (
                    nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                )
            setattr(module, own, replaced[tensor])


@contextmanager
def _no_packing_check() -> Iterator[None]:
    """Transformers looks at position ids to find packed samples; fake ones cannot be looked at.

    tightfit's batches are not packed, for which the real check answers None as well.
    """
    original = transformers.masking_utils.find_packed_sequence_indices
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        transformers.masking_utils.find_packed_sequence_indices = original


@contextmanager
def _no_module_moves() -> Iterator[None]:
    """`Module.to` swaps parameters, which fake ones refuse; here all are where they belong."""
    original = nn.Module.to
    nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


@contextmanager
def _real_meshes() -> Iterator[None]:
    """FSDP2 joins its mesh and that of a tensor group, and computes with the numbers of ranks."""
    original = DeviceMesh._concatenate

    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return original(meshes)

    DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(original)  # type: ignore[method-assign]
