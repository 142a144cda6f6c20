"""The ranks of a run as a grid of named dimensions.

Ranks are numbered so that those that talk most are neighbours, and neighbours share a machine:

| dimension | what its ranks share | what they send |
|---|---|---|
| `tensor` | each layer's matrices | four sums of activations per layer, which nothing hides |
| `shard` | the model states (ZeRO) | every layer's parameters and gradients, behind computation |
| `replicate` | nothing: each has all of them | the gradients of a shard, once per step |
| `pipeline` | the layers | activations between two of them, once per micro-batch |

`tensor` changes fastest from rank to rank and `pipeline` slowest: 8 ranks on two machines with 2
tensor ranks and 2 replicas of 2 shards keep all but the gradients' last sum inside a machine.
Dimensions of one rank are not made. Knows nothing of models.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tightfit import ledger
from tightfit.errors import ConfigError
from tightfit.policies import ShardingPolicy


class Dimension(StrEnum):
    """What ranks that differ in one number of their place have in common; outermost first."""

    PIPELINE = "pipeline"
    REPLICATE = "replicate"
    SHARD = "shard"
    TENSOR = "tensor"


class Mesh:
    """All ranks, and the place of this one among them.

    Args:
        policy: says how many ranks each dimension has.
        device: whose type the ranks compute on.

    Raises:
        ConfigError: this process is not one of as many ranks as the policy says.
    """

    def __init__(self, policy: ShardingPolicy, device: torch.device) -> None:
        _check_ranks(policy)
        self.device = device
        self._sizes = {
            Dimension.PIPELINE: policy.pipeline_parallel,
            Dimension.REPLICATE: policy.data_parallel // policy.shards,
            Dimension.SHARD: policy.shards,
            Dimension.TENSOR: policy.tensor_parallel,
        }
        shared = [dimension for dimension, size in self._sizes.items() if size > 1]
        self._whole: DeviceMesh | None = None
        if shared:
            sizes = tuple(self._sizes[dimension] for dimension in shared)
            # The mesh computes with its numbers, so they are real in a dry run too. torch keeps
            # those few bytes until there is another mesh.
            with unset_fake_temporarily(), ledger.uncounted():
                self._whole = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(shared))

    def size(self, dimension: Dimension) -> int:
        """Ranks along it."""
        return self._sizes[dimension]

    def rank(self, dimension: Dimension) -> int:
        """The number of this rank along it."""
        if self._sizes[dimension] == 1:
            return 0
        return self._some.get_local_rank(str(dimension))

    def group(self, dimension: Dimension) -> dist.ProcessGroup:
        """Those that differ from this rank along it alone; there are others."""
        return self._some.get_group(str(dimension))

    def part(self, *dimensions: Dimension) -> DeviceMesh:
        """The ranks along several dimensions, each of several ranks, as torch wants them."""
        names = tuple(str(dimension) for dimension in dimensions)
        with unset_fake_temporarily():
            return self._some if names == self._some.mesh_dim_names else self._some[names]

    @property
    def data_rank(self) -> int:
        """The number of this rank among those that see different sequences."""
        shard = self.rank(Dimension.SHARD)
        return self.rank(Dimension.REPLICATE) * self.size(Dimension.SHARD) + shard

    @property
    def data_ranks(self) -> int:
        """How many see different sequences."""
        return self.size(Dimension.REPLICATE) * self.size(Dimension.SHARD)

    @property
    def _some(self) -> DeviceMesh:
        assert self._whole is not None, "a single rank has no group"
        return self._whole


def is_shard(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 has it: it is a part that is gathered before it is used."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return Dimension.SHARD in (names or ())


def is_divided(parameter: torch.Tensor) -> bool:
    """Whether each rank of a tensor group has a part of it; the innermost dimension is theirs."""
    assert isinstance(parameter, DTensor)
    return not parameter.placements[-1].is_replicate()


def _check_ranks(policy: ShardingPolicy) -> None:
    """See that the ranks are there; where one is planned for, it may be one of any number.

    Raises:
        ConfigError: they are not, or there are others.
    """
    here = dist.get_world_size() if dist.is_initialized() else 1
    if policy.ranks not in (1, here):
        raise ConfigError(
            f"the plan is for {policy.ranks} ranks, and this is a process group of {here}; start "
            f"{policy.ranks} processes (torchrun --nproc_per_node {policy.ranks}) that call "
            "torch.distributed.init_process_group, or plan for as many as there are"
        )
