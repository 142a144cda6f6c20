"""Data-parallel ranks that share out the model states, on torch's FSDP2.

ZeRO's stages (https://arxiv.org/abs/1910.02054) in terms of `fully_shard`, which is put on every
decoder layer and on the root, whose group holds the rest: embedding, last norm, output layer. With
P bytes of parameters, L of them in a layer, R in the root, T of those trained, a device of N ranks
holds, beside activations:

| stage | always | from forward to backward | gradients | optimizer states |
|---|---|---|---|---|
| 0 | P | | T | all |
| 1 | P/N | P: every layer stays whole until backward is through with it | T/N; before the last \
micro-batch all of T | 1/N |
| 2 | P/N | P, as in stage 1 | T/N | 1/N |
| 3 | P/N | R: a layer is whole while it computes | T/N | 1/N |

FSDP2 keeps the shard beside the whole parameter, so P/N is there all the time. Gathering takes a
buffer as large as what it gathers, which lives until the next layer's copy is out; in backward the
layer to come is gathered ahead. Whole gradients of a layer live until they are copied to the buffer
that is scattered, and that buffer until the next layer needs one. In stage 3 this makes up to 2 L
in forward and 4 L in backward, and the root's R and its whole gradients stay to the end of
backward.

All of these are `Kind.COLLECTIVES`, except gradients that wait whole for further micro-batches in
stage 1. Stage 0 needs none: gradients are summed in their place.

Shards are padded: of ceil(rows / N) rows. Where there are several replicas of the shards (HSDP), N
counts the ranks of one replica, and each gradient shard is summed over replicas in its place, which
takes no memory. What tensor-parallel ranks have divided before is sharded further: P and L are then
what one of those has. Knows nothing of how ranks are started or how weights get into shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.clipping import Gradients, total_norm
from tightfit.engine.hooks import when_accumulated
from tightfit.engine.layers import own_layers
from tightfit.engine.mesh import Dimension, Mesh, is_shard
from tightfit.engine.ranks import OneRank, Ranks, Replicas, TensorGroup, square_over, summed
from tightfit.engine.rings import gather, goes_round, scatter_sum
from tightfit.errors import UnsupportedError
from tightfit.policies import Policies, Tier


def apply_sharding(
    root: nn.Module, model: PreTrainedModel, policies: Policies, mesh: Mesh
) -> Ranks:
    """Share the model states of `root` out as the policy says; with one rank there is no one to.

    Afterwards its parameters are DTensors that hold this rank's shard (stages 1 to 3).

    Args:
        root: what is called in training: the model, or peft's wrapping of it. Tensor-parallel
            ranks have divided it already.
        model: the model of transformers in it, the same on all ranks.

    Raises:
        UnsupportedError: trained parameters of several types.
    """
    ranks = _data_ranks(root, model, policies, mesh)
    if mesh.size(Dimension.TENSOR) == 1:
        return ranks
    return TensorGroup(ranks, mesh.group(Dimension.TENSOR), mesh.device)


def _data_ranks(root: nn.Module, model: PreTrainedModel, policies: Policies, mesh: Mesh) -> Ranks:
    if mesh.data_ranks == 1:
        return OneRank()
    if mesh.size(Dimension.SHARD) > 1:
        return _shard(model, own_layers(model), policies, mesh)
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    leave = policies.placement.gradients is not Tier.DEVICE
    return Replicas(mesh.group(Dimension.REPLICATE), root, trained, gradients_leave=leave)


def _check_types(root: nn.Module) -> None:
    """See that what is trained has one type, which FSDP2 needs of every group.

    Raises:
        UnsupportedError: some of it is kept in fp32 whatever the precision (routers of DeepSeek).
    """
    types = {p.dtype: name for name, p in root.named_parameters() if p.requires_grad}
    if len(types) > 1:
        named = " and ".join(f"{dtype} ({name})" for dtype, name in types.items())
        raise UnsupportedError(
            f"ZeRO stages need one type for all that is trained, and this model has {named}; set "
            "precision: fp32, zero_stage: 0, or train adapters (finetuning_type: lora)"
        )


def _shard(root: nn.Module, layers: Sequence[nn.Module], policies: Policies, mesh: Mesh) -> Shards:
    _check_types(root)
    several = mesh.size(Dimension.REPLICATE) > 1
    dimensions = (Dimension.REPLICATE, Dimension.SHARD) if several else (Dimension.SHARD,)
    ranks = mesh.part(*dimensions)
    stage = policies.sharding.zero_stage
    with ledger.labelled(Kind.PARAMETERS):
        for layer in layers:
            fully_shard(layer, mesh=ranks, reshard_after_forward=stage == 3)
        fully_shard(root, mesh=ranks, reshard_after_forward=False)  # backward begins with it
    waits = stage == 1 and policies.batch.accumulation_steps > 1
    books = _Books(Kind.GRADIENTS if waits else Kind.COLLECTIVES)
    modules = (*layers, root)
    for module in modules:
        module.register_forward_pre_hook(books.unsharded)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(BookedAllGather())
        module.set_custom_reduce_scatter(_BookedReduceScatter())
    return Shards(modules, books, mesh, waits_for_last=stage == 1)


class Shards:
    """Ranks that each hold a part of the model states; see `Ranks`.

    Args:
        modules: those of FSDP2, the outermost last.
        mesh: all ranks.
        waits_for_last: gradients of earlier micro-batches stay whole, and are summed over ranks
            with those of the last.
    """

    copies: frozenset[nn.Parameter] = frozenset()

    def __init__(
        self, modules: Sequence[nn.Module], books: _Books, mesh: Mesh, *, waits_for_last: bool
    ) -> None:
        self.data_rank = mesh.data_rank
        self.data_ranks = mesh.data_ranks
        self.is_first = mesh.data_rank == 0
        self.is_first_copy = mesh.rank(Dimension.REPLICATE) == 0
        self._group = mesh.group(Dimension.SHARD)
        self._groups = [
            mesh.group(dimension)
            for dimension in (Dimension.SHARD, Dimension.REPLICATE)
            if mesh.size(dimension) > 1
        ]
        self._modules = [module for module in modules if isinstance(module, FSDPModule)]
        self._root = self._modules[-1]
        self._books = books
        self._waits_for_last = waits_for_last
        self._waiting = False

    def total(self, values: Sequence[float]) -> list[float]:
        """See `Ranks.total`."""
        return summed(values, next(self._root.parameters()).device, *self._groups)

    def settle(self) -> None:
        """See `Ranks.settle`: what a forward without a backward has left whole is dropped."""
        for module in self._modules:
            module.reshard()

    def begin_backward(self, *, last: bool) -> None:
        """See `Ranks.begin_backward`."""
        if self._waits_for_last:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
            self._waiting = not last

    def finish_gradients(self) -> None:
        """See `Ranks.finish_gradients`; a step of fewer micro-batches is summed here."""
        if self._waiting:
            self.begin_backward(last=True)
            # What FSDP2 does at the end of each backward: it sums what is not summed yet.
            self._root._get_fsdp_state()._root_post_backward_final_callback()
        self.settle()  # the step makes stale what is whole

    def discard_gradients(self) -> None:
        """See `Ranks.discard_gradients`."""
        self._waiting = False
        self._root.reset_iter_state()
        self._books.forget_gradients()

    def global_norm(
        self, gradients: Gradients, known: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """The root of the sum of squares, added in fp64 so that the order of ranks is no matter."""
        norm = total_norm(gradients, known)
        device = next(self._root.parameters()).device
        square = square_over(norm, self._group, device)
        return square.sqrt().to(norm.device, norm.dtype)


class _Books:
    """Says what FSDP2's whole parameters and their gradients are for.

    Args:
        gradient_kind: of whole gradients.
    """

    def __init__(self, gradient_kind: Kind) -> None:
        self._gradient_kind = gradient_kind
        self._trained: set[torch.Tensor] = set()

    def unsharded(self, module: nn.Module, inputs: object) -> None:
        """A forward pre-hook, called after FSDP2's own, which has made parameters whole."""
        for parameter in module.parameters():
            if is_shard(parameter):  # of a module inside, not whole yet
                continue
            ledger.mark(parameter, Kind.COLLECTIVES)
            if parameter.requires_grad and parameter not in self._trained:
                self._trained.add(parameter)
                when_accumulated(parameter, self._mark_gradient)

    def forget_gradients(self) -> None:
        """Drop whole gradients that were not summed."""
        for parameter in self._trained:
            parameter.grad = None

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.mark(parameter.grad, self._gradient_kind)


class BookedAllGather(DefaultAllGather):
    """FSDP2's gather, whose buffers are booked; on CPUs it goes round the ranks."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; the input is this rank's part of the output."""
        if async_op or not goes_round(output_tensor, group):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        gather(output_tensor, group)
        return None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialised buffer."""
        with ledger.labelled(Kind.COLLECTIVES):
            return super().allocate(size, dtype=dtype, device=device)


class _BookedReduceScatter(DefaultReduceScatter):
    """FSDP2's sum and scatter, whose buffers are booked; the output becomes the gradients. On CPUs
    it goes round the ranks."""

    def __call__(  # type: ignore[override]  # as `ReduceScatter` has it
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum, which is what FSDP2 was told to do; nobody reads the input afterwards."""
        if async_op or not goes_round(output_tensor, group):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        assert op == dist.ReduceOp.SUM
        scatter_sum(output_tensor, input_tensor, group)
        return None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialised buffer."""
        with ledger.labelled(Kind.COLLECTIVES):
            return super().allocate(size, dtype=dtype, device=device)
