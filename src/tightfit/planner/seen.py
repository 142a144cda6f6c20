"""What one dry run had of its batch at one moment, and what others take at such a moment at least.

The measured part of a lower bound (`bounds.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.bill.table import Kind
from tightfit.policies import LossPolicy, PlacementPolicy, Policies, ShardingPolicy, Tier


@dataclass(frozen=True)
class Seen:
    """The kinds of a batch at one moment, and the micro-batch that they are of.

    Attributes:
        sharding: decides what is temporary beside what layers leave, and how much of that.
        placement: decides which parameters are on the device then.
        kinds: on the device.
        of_layers: of the activations there, what certainly is not the loss's own; 0 in backward,
            where a layer's are made again that the loss did not see, and of a stage's layers.
        host_bytes: of activations that had left it.
        parameter_bytes: on the device, whatever the batch.
        collective_bytes: of gathered parameters and gradients, whatever the batch.
        allocator_bytes: what a card's allocator could not hand out.
    """

    loss: LossPolicy
    sharding: ShardingPolicy
    placement: PlacementPolicy
    sequences: int
    kinds: dict[Kind, int]
    of_layers: int
    host_bytes: int
    parameter_bytes: int
    collective_bytes: int
    allocator_bytes: int

    def least_bytes(self, policies: Policies, parameter_bytes: int, gathered_bytes: int) -> int:
        """What another micro-batch takes at the same moment, at least, and parameters that visit
        the device then or are gathered.

        Args:
            parameter_bytes: that stay on it.
            gathered_bytes: that are counted apart.
        """
        kinds, own, its = dict(self.kinds), self.placement, policies.placement
        ways = (own.activations, own.prefetch), (its.activations, its.prefetch)
        if its.activations is not Tier.DEVICE and ways[0] != ways[1]:
            kinds.pop(Kind.ACTIVATIONS, None)
        alike = _parameters_are(own) == _parameters_are(its)
        visiting = max(0, self.parameter_bytes - parameter_bytes) if alike else 0
        gathered = max(0, self.collective_bytes - gathered_bytes)
        return int(sum(kinds.values()) * self._share(policies)) + visiting + gathered

    def is_near(self, policies: Policies) -> bool:
        """Whether no more than a smaller micro-batch and other states set it apart from them."""
        placement = policies.placement
        return (
            self.sequences >= policies.batch.micro_batch_size
            and _parameters_are(self.placement) == _parameters_are(placement)
            and self.placement.activations is placement.activations
        )

    def likely_allocator_bytes(self, policies: Policies) -> int:
        """What the allocator is likely to hold beside tensors, with a smaller micro-batch."""
        return int(self.allocator_bytes * self._share(policies))

    def least_of_layers(self, policies: Policies, replicated_bytes: float) -> int:
        """The same of what layers leave, whatever the loss and however ranks divide the model.

        Args:
            replicated_bytes: of a sequence, that each tensor rank has.
        """
        fewer = self.sharding.tensor_parallel / policies.sharding.tensor_parallel
        replicated = min(replicated_bytes * self.sequences, self.of_layers)
        divided = (self.of_layers - replicated) * min(1.0, fewer)
        return int((replicated + divided) * self._share(policies))

    def least_host_bytes(self, policies: Policies) -> int:
        """The same of activations that leave."""
        return int(self.host_bytes * self._share(policies))

    def _share(self, policies: Policies) -> float:
        return min(1.0, policies.batch.micro_batch_size / self.sequences)


def _parameters_are(placement: PlacementPolicy) -> tuple[Tier, float, int]:
    """Decides which parameters visit the device, and when."""
    return placement.parameters, placement.parameter_fraction, placement.prefetch
