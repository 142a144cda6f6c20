"""Where each tensor of a model and its optimizer states live under policies.

The last layers' states leave first and the first layers' parameters, as many as the fractions say;
what belongs to no layer leaves with all layers only. Knows no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tightfit.bill.shards import Group, ModelTensors, Tensor
from tightfit.policies import Policies, Tier


@dataclass(frozen=True)
class Placed:
    """A tensor in its place.

    Attributes:
        values: the tier where its values live; elsewhere than on the device, they visit it.
        states: the tier where it is updated and has its states; of one that is not trained, no
            matter.
    """

    tensor: Tensor
    values: Tier
    states: Tier


PlacedGroup = tuple[Placed, ...]


def placed_groups(model: ModelTensors, policies: Policies, *, sharded: bool) -> list[PlacedGroup]:
    """The groups that visit the device together, in the order of forward.

    Args:
        policies: placement and adapter are read.
        sharded: whether all that is in no layer is one group, as ranks gather it.
    """
    placement, count = policies.placement, len(model.layers)
    stay = count - ceil(placement.optimizer_fraction * count)  # the first ones, with their states
    leave = ceil(placement.parameter_fraction * count)
    all_states, all_values = placement.optimizer_fraction == 1, placement.parameter_fraction == 1
    outside = [
        _group(tensors, policies, states_leave=all_states, values_leave=all_values)
        for tensors in ([model.root] if sharded else [model.embedding, model.head])
    ]
    layers = [
        _group(tensors, policies, states_leave=index >= stay, values_leave=index < leave)
        for index, tensors in enumerate(model.layers)
    ]
    return [*outside[:1], *layers, *outside[1:]]


def _group(
    tensors: Group, policies: Policies, *, states_leave: bool, values_leave: bool
) -> PlacedGroup:
    states = policies.placement.optimizer_states if states_leave else Tier.DEVICE
    values = policies.placement.parameters if values_leave else Tier.DEVICE
    # Adapters do not live farther away than where they are updated.
    adapters = states if policies.adapter is not None and states is not Tier.NVME else values
    return tuple(
        Placed(
            tensor, adapters if tensor.trainable and values is not Tier.DEVICE else values, states
        )
        for tensor in tensors
    )
