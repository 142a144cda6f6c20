"""What ranks send each other in one optimizer step, along each dimension of the mesh.

Closed forms of what the engine does (`engine/sharding.py`, `tensor_styles.py`, `stage_schedule.py`
and the losses), for decoders of the usual kind: attention and one feed-forward network in a layer.
Of a pipeline's stages and of the ranks along a dimension it is the one that sends most. Gathers and
sums are taken to go round in a ring, in which each of n ranks sends (n - 1) / n of what is gathered
or scattered and twice that of what is summed on all (https://doi.org/10.1016/j.jpdc.2008.09.002;
for ZeRO https://arxiv.org/abs/1910.02054, section 7; for tensor ranks
https://arxiv.org/abs/1909.08053, section 3). Left out: padding of shards, gradients of key heads
that tensor ranks repeat and of query and key norms, evaluations. Knows no rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tightfit.bill.quantised import quantised_bytes
from tightfit.engine.mesh import Dimension
from tightfit.facts.workload import Workload
from tightfit.policies import LossKind, Policies, ShardingPolicy, Tier
from tightfit.units import MIB

_FP32 = 4
_PIECE_BYTES = 16 * MIB  # in which two stages exchange gradients of a tied embedding
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # divided by outputs
_ROWS = ("o_proj", "down_proj")  # divided by inputs


class Collective(StrEnum):
    """What ranks do together. One that sends to another has no ring."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SEND = "send"


@dataclass(frozen=True)
class Exchange:
    """One collective that ranks make again and again.

    Attributes:
        dimension: of the mesh, along which the ranks differ.
        ranks: how many there are.
        bytes_each: of what is gathered, scattered, summed or sent, whole, on average.
        count: of such calls in a step.
        hidden: whether the device can compute meanwhile, as what comes next does not need it yet.
    """

    dimension: Dimension
    kind: Collective
    ranks: int
    bytes_each: float
    count: float
    hidden: bool = False

    @property
    def sent_bytes(self) -> float:
        """What one rank sends in a step."""
        times = {Collective.SEND: 1.0, Collective.ALL_REDUCE: 2 * (self.ranks - 1) / self.ranks}
        return times.get(self.kind, (self.ranks - 1) / self.ranks) * self.bytes_each * self.count


@dataclass(frozen=True)
class ModelSizes:
    """What exchanges depend on of a model, all ranks together.

    Attributes:
        trainable, frozen, quantised: parameters, of which each is one of the three.
        trained_tensors: how many tensors the first are.
        tied: whether embedding and output layer are one.
    """

    trainable: int
    frozen: int
    quantised: int
    trained_tensors: int
    layers: int
    hidden_size: int
    vocab_size: int
    tied: bool


def exchanges(sizes: ModelSizes, policies: Policies, workload: Workload) -> list[Exchange]:
    """All of one optimizer step; empty with one rank."""
    if policies.sharding.ranks == 1:
        return []
    step = _Step(sizes, policies, workload)
    found = [*_sharded(step), *_replicated(step), *_tensor(step), *_pipeline(step)]
    return [exchange for exchange in found if exchange.ranks > 1 and exchange.count]


def sent_bytes(found: Iterable[Exchange]) -> float:
    """What one rank sends in all of them."""
    return sum(exchange.sent_bytes for exchange in found)


def bytes_between_machines(found: Iterable[Exchange], policies: Policies, machines: int) -> float:
    """What leaves one machine in a step, where ranks are numbered machine by machine.

    Of a ring that goes through several machines one rank of each sends out of it; a rank that is
    alone on its machine is one of as many rings as the machine has ranks.
    """
    sharding = policies.sharding
    here = sharding.ranks / machines
    total = 0.0
    for exchange in found:
        together = ranks_together(exchange, sharding, machines)
        if together < exchange.ranks:
            total += exchange.sent_bytes * here / together
    return total


def ranks_together(exchange: Exchange, sharding: ShardingPolicy, machines: int) -> float:
    """How many ranks of one group are on a machine."""
    here = sharding.ranks / machines
    return max(1.0, min(exchange.ranks, here / distances(sharding)[exchange.dimension]))


def distances(sharding: ShardingPolicy) -> dict[Dimension, int]:
    """How far apart neighbours along each dimension are numbered."""
    return {
        Dimension.TENSOR: 1,
        Dimension.SHARD: sharding.tensor_parallel,
        Dimension.REPLICATE: sharding.tensor_parallel * sharding.shards,
        Dimension.PIPELINE: sharding.tensor_parallel * sharding.data_parallel,
    }


@dataclass(frozen=True)
class _Bytes:
    """Parameters and gradients of one rank's layers, each, and of what belongs to no layer."""

    layer: float
    layer_gradients: float
    root: float
    root_gradients: float


class _Step:
    """One optimizer step of a rank that sends most."""

    def __init__(self, sizes: ModelSizes, policies: Policies, workload: Workload) -> None:
        self.sizes, self.policies, self.sharding = sizes, policies, policies.sharding
        self.width = policies.precision.parameter_bytes
        self.micro_batches = policies.batch.accumulation_steps
        self.layers = sizes.layers / self.sharding.pipeline_parallel
        tokens = workload.average_tokens_per_step / self.sharding.data_parallel
        self.tokens = tokens / self.micro_batches  # of a micro-batch
        self.hidden = self.tokens * sizes.hidden_size * self.width
        self.bytes = self._bytes()

    def _bytes(self) -> _Bytes:
        """Those of one part where tensor ranks share them; with stages of one that has an end."""
        sizes, tensor, adapted = self.sizes, self.sharding.tensor_parallel, self._is_adapted
        matrix, norm = sizes.vocab_size * sizes.hidden_size, sizes.hidden_size
        own_ends = 1 if sizes.tied or self.sharding.pipeline_parallel > 1 else 2
        root = (own_ends * matrix + norm) * self.width / tensor
        plain = sizes.frozen + (0 if adapted else sizes.trainable)
        plain -= (1 if sizes.tied else 2) * matrix + norm
        each = max(0, plain) * self.width / sizes.layers / tensor  # ends may be trained whole
        if not adapted:
            return _Bytes(each, each, root, root)
        trained = sizes.trainable * _FP32 / sizes.layers / tensor
        packed = 0
        if self.policies.quantisation is not None:
            packed = quantised_bytes((sizes.quantised,), self.policies.quantisation)
        return _Bytes(each + trained + packed / sizes.layers / tensor, trained, root, 0.0)

    @property
    def trained_tensors(self) -> float:
        """Of one rank; beside the layers' a matrix of the vocabulary and a norm."""
        outside = 0 if self._is_adapted else (2 if self.sizes.tied else 3)
        own = 2 if outside and self.sharding.pipeline_parallel > 1 else outside
        in_layers = self.sizes.trained_tensors - outside
        return in_layers / self.sharding.pipeline_parallel + own

    @property
    def _is_adapted(self) -> bool:
        """Then all that is trained is fp32 and in layers."""
        return self.policies.adapter is not None


def _sharded(step: _Step) -> Iterator[Exchange]:
    """Stages 1 to 3; see `engine/sharding.py`. What belongs to no layer stays whole from forward to
    the end of backward, and stage 1 keeps all that it has gathered to the last micro-batch."""
    sharding, batches, parts = step.sharding, step.micro_batches, step.bytes
    ranks, replicas = sharding.shards, sharding.data_parallel // sharding.shards
    stage = sharding.zero_stage
    if not stage:
        return
    passes = 1 if stage == 1 else batches
    gathers = (2 if stage == 3 else 1) * passes
    along = Dimension.SHARD
    yield Exchange(along, Collective.ALL_GATHER, ranks, parts.layer, gathers * step.layers, True)
    yield Exchange(along, Collective.ALL_GATHER, ranks, parts.root, passes, True)
    for gradients, units in ((parts.layer_gradients, step.layers), (parts.root_gradients, 1)):
        count = passes * units if gradients else 0
        yield Exchange(along, Collective.REDUCE_SCATTER, ranks, gradients, count, True)
        yield Exchange(
            Dimension.REPLICATE, Collective.ALL_REDUCE, replicas, gradients / ranks, count, True
        )
    norms = 2 if sharding.tensor_parallel > 1 else 1
    yield Exchange(along, Collective.ALL_REDUCE, ranks, (16 + 8 * norms) / (1 + norms), 1 + norms)
    yield Exchange(Dimension.REPLICATE, Collective.ALL_REDUCE, replicas, 16, 1)


def _replicated(step: _Step) -> Iterator[Exchange]:
    """Stage 0: each trained tensor's gradient, in the last micro-batch; in every one where
    gradients leave the device as they come."""
    sharding, parts = step.sharding, step.bytes
    if sharding.zero_stage:
        return
    leave = step.policies.placement.gradients is not Tier.DEVICE
    times = step.micro_batches if leave else 1
    total = parts.layer_gradients * step.layers + parts.root_gradients
    tensors = max(1.0, step.trained_tensors)
    along, ranks = Dimension.REPLICATE, sharding.data_parallel
    yield Exchange(
        along, Collective.ALL_REDUCE, ranks, total / tensors, times * tensors, hidden=not leave
    )
    yield Exchange(along, Collective.ALL_REDUCE, ranks, 16, 1)


def _tensor(step: _Step) -> Iterator[Exchange]:
    """Hidden states: after attention and after the feed-forward network, as much again for the
    gradients of their inputs; one more after attention where a layer is computed again, which ends
    before its last sum. And those of the embedding or of the gradients of the loss's input."""
    batches, ranks = step.micro_batches, step.sharding.tensor_parallel
    along, checkpointing = Dimension.TENSOR, step.policies.checkpointing
    again = 1 / checkpointing.every if checkpointing.enabled else 0
    ends = 1 if step.sharding.pipeline_parallel > 1 else 2
    sums = (4 + again) * step.layers + ends
    if step.policies.adapter is not None and ends == 2:
        sums -= 1  # what a frozen embedding gives to the first layer has no gradient
    yield Exchange(along, Collective.ALL_REDUCE, ranks, step.hidden, sums * batches)
    yield from _adapters(step, again)
    yield from _loss(step)
    yield Exchange(along, Collective.ALL_REDUCE, ranks, 8, 1)


def _adapters(step: _Step, again: float) -> Iterator[Exchange]:
    """What passes between LoRA's two matrices: its gradients where outputs are divided, its values
    where inputs are. `again`: see `_tensor`."""
    adapter = step.policies.adapter
    if adapter is None:
        return
    named = adapter.targets or (*_COLUMNS, *_ROWS)
    columns = sum(name in _COLUMNS for name in named)
    rows = sum(name in _ROWS for name in named) + again * ("o_proj" in named)
    count = (columns + rows) * step.layers * step.micro_batches
    yield Exchange(
        Dimension.TENSOR,
        Collective.ALL_REDUCE,
        step.sharding.tensor_parallel,
        step.tokens * adapter.rank * _FP32,
        count,
    )


def _loss(step: _Step) -> Iterator[Exchange]:
    """All logits, or for each token the highest logit and two sums, in as many chunks."""
    loss, ranks = step.policies.loss, step.sharding.tensor_parallel
    if loss.kind is LossKind.FULL:
        logits = step.tokens * step.sizes.vocab_size * step.width
        yield Exchange(Dimension.TENSOR, Collective.ALL_GATHER, ranks, logits, step.micro_batches)
        return
    chunks = 1
    if loss.kind is LossKind.CHUNKED:
        chunks = math.ceil(step.tokens / loss.chunk_tokens)
    each = 3 * _FP32 * step.tokens / (2 * chunks)
    count = 2 * chunks * step.micro_batches
    yield Exchange(Dimension.TENSOR, Collective.ALL_REDUCE, ranks, each, count)


def _pipeline(step: _Step) -> Iterator[Exchange]:
    """Hidden states to the next stage and their gradients to the previous one, where there are
    both; what the two ends have of a tied embedding, in pieces; the loss and the norm."""
    stages, along = step.sharding.pipeline_parallel, Dimension.PIPELINE
    both = 2 * step.sharding.virtual_stages  # ways, through each of a stage's runs of layers
    batches = step.micro_batches

    def send(each: float, count: int) -> Exchange:
        return Exchange(along, Collective.SEND, stages, each, count)

    end, inside = ([send(step.hidden, count * batches)] for count in (both - 1, both))
    if step.sizes.tied and step.policies.adapter is None:
        rows = step.sizes.vocab_size / step.sharding.tensor_parallel / step.sharding.shards
        gradient = rows * step.sizes.hidden_size * step.width
        pieces = math.ceil(gradient / _PIECE_BYTES)
        end.append(send(gradient / pieces, pieces))
    yield from max([end, inside] if stages > 2 else [end], key=sent_bytes)
    yield Exchange(along, Collective.ALL_REDUCE, stages, 8, 2)
