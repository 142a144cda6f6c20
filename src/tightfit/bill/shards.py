"""Shapes of a model's tensors, and which part of each one rank holds.

Knows shapes, groups and ranks; what a value weighs and what the optimizer adds is the business of
others. The sharding is that of torch's `fully_shard`: every decoder layer is one group, embedding,
final norm and output layer together are the root group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from tightfit.bill.stages import stage_layers

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def ceil_divide(count: int, parts: int) -> int:
    """`count / parts` rounded up."""
    return -(-count // parts)


def shard_rows(rows: int, ranks: int, rank: int = 0) -> int:
    """Rows of dimension 0 that belong to `rank`, cut as `torch.chunk` cuts.

    Every rank but the last ones has ceil(rows / ranks); those have fewer, or none. `fully_shard`
    allocates parameters and gradients as long as rank 0's on every rank.
    """
    chunk = ceil_divide(rows, ranks)
    return min(chunk, max(0, rows - rank * chunk))


@dataclass(frozen=True)
class Tensor:
    """`count` parameters of one shape.

    Attributes:
        divided_dim: the dimension that tensor-parallel ranks share out; None: each rank has all,
            as with norms.
        quantised: a frozen matrix that a `QuantisationPolicy` stores in few bits.
    """

    shape: tuple[int, ...]
    count: int = 1
    trainable: bool = True
    divided_dim: int | None = None
    quantised: bool = False

    @property
    def elements(self) -> int:
        """Values in one of them."""
        return prod(self.shape)

    @property
    def total_elements(self) -> int:
        """Values in all of them."""
        return self.count * self.elements

    def divided(self, tensor_parallel: int) -> Tensor:
        """What one of `tensor_parallel` ranks holds: ceil of the divided dimension."""
        if self.divided_dim is None:
            return self
        return self._with_size(
            self.divided_dim, ceil_divide(self.shape[self.divided_dim], tensor_parallel)
        )

    def sharded(self, ranks: int) -> Tensor:
        """What a data-parallel rank allocates: ceil(rows / ranks) rows, padding included."""
        return self._with_size(0, shard_rows(self.shape[0], ranks))

    def _with_size(self, dim: int, size: int) -> Tensor:
        return replace(self, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]))


Group = tuple[Tensor, ...]


@dataclass(frozen=True)
class ModelTensors:
    """A model's parameters by the groups that are gathered and freed together.

    Attributes:
        embedding: what runs before the layers.
        layers: one group per decoder layer.
        head: what runs after them; without the output layer's matrix where `tied`.
        tied: the output layer is the embedding, stored once (twice across pipeline stages).
    """

    embedding: Group
    layers: tuple[Group, ...]
    head: Group
    tied: bool = False

    @classmethod
    def flat(
        cls, trainable: int, frozen: int = 0, quantised: int = 0, *, layers: int = 1
    ) -> ModelTensors:
        """A model of which only counts are known: divided evenly, with nothing at its ends.

        Args:
            trainable: parameters that get gradients.
            frozen: parameters that get none, kept in the job's precision.
            quantised: parameters that get none, stored in few bits.
            layers: groups that the counts are spread over.
        """
        group = (
            _share(trainable, layers),
            replace(_share(frozen, layers), trainable=False),
            replace(_share(quantised, layers), trainable=False, quantised=True),
        )
        return cls((), (tuple(tensor for tensor in group if tensor.elements),) * layers, ())

    @classmethod
    def grouped(cls, named: Iterable[tuple[str, Tensor]], *, tied: bool = False) -> ModelTensors:
        """Group tensors by the first number in their names, as in `model.layers.3.mlp.up.weight`.

        Args:
            named: in the order of `named_parameters()`: what comes before the first layer is the
                embedding, what comes after it and has no number the head.
            tied: whether the output layer is the embedding, which `named` then holds once.
        """
        embedding: list[Tensor] = []
        head: list[Tensor] = []
        layers: dict[int, list[Tensor]] = {}
        for name, tensor in named:
            number = _LAYER_NUMBER.search(name)
            if number is not None:
                layers.setdefault(int(number[1]), []).append(tensor)
            else:
                (head if layers else embedding).append(tensor)
        ordered = tuple(tuple(layers[number]) for number in sorted(layers))
        return cls(tuple(embedding), ordered, tuple(head), tied)

    @property
    def root(self) -> Group:
        """The group of all that is in no layer."""
        return self.embedding + self.head

    def __iter__(self) -> Iterator[Tensor]:
        """All tensors, tied ones once."""
        yield from self.embedding
        for layer in self.layers:
            yield from layer
        yield from self.head

    def divided(self, tensor_parallel: int) -> ModelTensors:
        """What one of `tensor_parallel` ranks holds."""
        return replace(
            self,
            embedding=_divided(self.embedding, tensor_parallel),
            layers=tuple(_divided(layer, tensor_parallel) for layer in self.layers),
            head=_divided(self.head, tensor_parallel),
        )

    def stage(
        self, stage: int, stages: int, chunks: int = 1, given: Sequence[int] = ()
    ) -> ModelTensors:
        """What pipeline stage `stage` of `stages` holds: `chunks` runs of layers, the ends at the
        ends.

        Where the output layer is tied, the last stage has a copy of the embedding.

        Args:
            given: how many layers each run has, if somebody says so.

        Raises:
            UnsupportedError: as `stage_layers`.
        """
        if stages == 1:
            return self
        first, last = stage == 0, stage == stages - 1
        weights = [_weight(group) for group in (self.embedding, *self.layers, self.head)]
        embedding, *layer_weights, head = weights
        head += embedding * self.tied
        runs = stage_layers(layer_weights, embedding, head, stages, chunks, given)
        layers = tuple(self.layers[number] for run in runs[stage::stages] for number in run)
        own = self.embedding if first or (last and self.tied) else ()
        return ModelTensors(own, layers, self.head if last else ())

    def count(self, *, trainable: bool, quantised: bool = False) -> int:
        """Parameters of one sort."""
        return sum(
            tensor.total_elements
            for tensor in self
            if tensor.trainable == trainable and tensor.quantised == quantised
        )


def _weight(group: Group) -> int:
    """Parameters of the base, which the engine cuts before it adds adapters."""
    frozen = [tensor for tensor in group if not tensor.trainable]
    return sum(tensor.total_elements for tensor in frozen or group)


def _share(count: int, layers: int) -> Tensor:
    return Tensor((ceil_divide(count, layers),), divided_dim=0)


def _divided(group: Group, tensor_parallel: int) -> Group:
    return tuple(tensor.divided(tensor_parallel) for tensor in group)


def adapter_tensors(outputs: int, inputs: int, rank: int, *, dora: bool = False) -> Group:
    """The trainable tensors that LoRA adds to a linear layer of weight [outputs, inputs].

    A [rank, inputs] and B [outputs, rank] (https://arxiv.org/abs/2106.09685); DoRA
    (https://arxiv.org/abs/2402.09353) adds one magnitude per output.
    """
    matrices = (Tensor((rank, inputs)), Tensor((outputs, rank)))
    return (*matrices, Tensor((outputs,))) if dora else matrices
