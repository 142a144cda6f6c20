"""What a process on an NVIDIA card holds beside its tensors: context, NCCL's buffers, workspaces.

Constants with their sources; no closed form exists for them and versions differ, so each comes
with how far off it may be. A rank on a CPU holds nothing of the kind. Knows nothing of models,
plans or torch.

`max_memory_allocated` and `max_memory_reserved` contain the workspaces, which torch's allocator
gives out, but neither the context nor NCCL's buffers; NVML and nvidia-smi count everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tightfit.units import KIB, MIB

Capability = tuple[int, int]

# A bare context by architecture, modules loaded lazily (CUDA 11.7 and later; before, more than
# 1000 MiB: pytorch#107667, and 1343 MiB on a V100 in transformers' model_memory_anatomy). It grows
# with the number of multiprocessors, so smaller cards of an architecture hold less.
# 8.6: 256 MiB, RTX 3090, torch 2.7 with CUDA 12.8 (invoke-ai/InvokeAI#9413).
# 8.9: 426 MiB, RTX 6000 Ada, torch 2.10 with CUDA 13.0 (unslothai/unsloth-zoo#1053).
# Others: about 400 MiB (pytorch#109888, card not named), scaled by multiprocessors per card.
_CONTEXT_MIB: dict[Capability, int] = {
    (7, 0): 320,
    (7, 5): 200,
    (8, 0): 420,
    (8, 6): 256,
    (8, 9): 426,
    (9, 0): 520,
    (10, 0): 560,
    (12, 0): 480,
}
_OTHER_CONTEXT_MIB = 450
# Kernels that a run loads into its context later: 160 MiB of memory outside torch appeared in
# 0.16 GiB on an H100 (vllm#12126) and 0.20 GiB on a 24 GB card (vllm#14447) while profiling.
_LOADED_KERNELS_MIB = 170
_CONTEXT_UNCERTAINTY = 0.4

# torch's CUDABlas workspaces (ATen/cuda/CublasHandlePool.cpp): `:4096:2:16:8` is the default,
# 32 MiB on Hopper and Blackwell; one per handle, and the threads of forward and of backward have a
# handle each. cuBLASLt takes 1 MiB more per handle where its workspace is not the same one.
_WORKSPACE_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
_WORKSPACE_LARGE_BYTES = 32 * MIB
_WORKSPACE_LARGE_FROM = 9
_LT_WORKSPACE_BYTES = MIB
_HANDLES = 2


class Link(StrEnum):
    """How the cards of one machine are connected; more bandwidth takes more channels."""

    PCIE = "pcie"
    NVLINK = "nvlink"


# A connection has one buffer per protocol on the receiving side, 10 MiB in all (Simple 4 MiB,
# which is NCCL_BUFFSIZE; LL128 about 4.7 MiB; LL 0.5 MiB), and 2 MiB on the sending one
# (measured in NVIDIA/nccl#1685: allocations of 10485760 and 2097152 bytes). A ring, which gathers
# and scatters use, connects to one rank on either side in every channel, and a tree, which
# all-reduces use, to about as many again.
_RING_CHANNEL_MIB = 12
_CHANNELS = {Link.PCIE: 4, Link.NVLINK: 24}
_TREE_FACTOR = 2
_DATA_CENTRE: tuple[Capability, ...] = ((7, 0), (8, 0), (9, 0), (10, 0))
_COMMUNICATOR_MIB = 30  # structures of a communicator that has not connected yet
_COMMUNICATION_UNCERTAINTY = 0.6


@dataclass(frozen=True)
class Runtime:
    """Bytes of one process on one card beside its tensors.

    Attributes:
        context_bytes: the CUDA context and the kernels loaded into it.
        communication_bytes: NCCL's buffers of all communicators.
        workspace_bytes: cuBLAS' workspaces, which torch's allocator gives out.
        uncertainty_bytes: how far off `outside_bytes` may be either way.
    """

    context_bytes: int = 0
    communication_bytes: int = 0
    workspace_bytes: int = 0
    uncertainty_bytes: int = 0

    @property
    def outside_bytes(self) -> int:
        """What torch's counters do not contain and NVML does."""
        return self.context_bytes + self.communication_bytes

    @property
    def total_bytes(self) -> int:
        """What a card must have free for it."""
        return self.outside_bytes + self.workspace_bytes


def runtime_bytes(
    capability: Capability | None,
    *,
    ranks: int = 1,
    communicators: int = 1,
    link: Link = Link.PCIE,
    all_reduces: bool = False,
) -> Runtime:
    """What each of `ranks` processes holds.

    Args:
        capability: the card's compute capability, such as `(8, 6)`; None for a rank on a CPU.
        communicators: process groups that really communicate; one per dimension of the mesh.
        link: between the cards of a machine.
        all_reduces: whether whole gradients are reduced (replicas) instead of gathers and
            scatters of shards alone.
    """
    if capability is None:
        return Runtime()
    context = (_CONTEXT_MIB.get(capability, _OTHER_CONTEXT_MIB) + _LOADED_KERNELS_MIB) * MIB
    communication = communicators * _communicator_bytes(link, all_reduces) if ranks > 1 else 0
    return Runtime(
        context_bytes=context,
        communication_bytes=communication,
        workspace_bytes=workspace_bytes(capability),
        uncertainty_bytes=int(
            _CONTEXT_UNCERTAINTY * context + _COMMUNICATION_UNCERTAINTY * communication
        ),
    )


def likely_link(capability: Capability | None) -> Link:
    """How cards of a capability are connected in most machines, where nobody says: data-centre
    cards by NVLink, which takes more, others by PCIe."""
    return Link.NVLINK if capability in _DATA_CENTRE else Link.PCIE


def workspace_bytes(capability: Capability) -> int:
    """cuBLAS' and cuBLASLt's workspaces of a process that trains."""
    large = capability[0] >= _WORKSPACE_LARGE_FROM
    workspace = _WORKSPACE_LARGE_BYTES if large else _WORKSPACE_BYTES
    return _HANDLES * (workspace + _LT_WORKSPACE_BYTES)


def _communicator_bytes(link: Link, all_reduces: bool) -> int:
    connected = _CHANNELS[link] * _RING_CHANNEL_MIB * (_TREE_FACTOR if all_reduces else 1)
    return (_COMMUNICATOR_MIB + connected) * MIB
