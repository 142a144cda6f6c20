"""A decoder's tensors under a job's policies, from the sizes of its layers.

Adds adapters where there are any, freezes what they leave alone and marks what a few-bit base
packs. Knows no architecture: whoever does says which linear maps a layer has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tightfit.bill.shards import Group, ModelTensors, Tensor, adapter_tensors
from tightfit.policies import Policies


@dataclass(frozen=True)
class LinearShape:
    """One linear map's weight [outputs, inputs].

    Attributes:
        adapted: it gets an adapter where the job has any.
    """

    outputs: int
    inputs: int
    adapted: bool = True


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        linears: what a few-bit base packs.
        stacked: weights of experts in one tensor [experts, outputs, inputs], never packed.
        vectors: lengths of norms and biases.
    """

    linears: tuple[LinearShape, ...]
    stacked: tuple[tuple[int, int, int], ...] = ()
    vectors: tuple[int, ...] = ()


def decoder_tensors(
    layers: Iterable[LayerShape],
    hidden: int,
    vocabulary: int,
    policies: Policies,
    *,
    tied: bool = False,
    dora: bool = False,
) -> ModelTensors:
    """All parameters of a decoder whose ends are an embedding, a final norm and an output layer.

    Args:
        layers: in their order.
        hidden: width of the hidden state.
        vocabulary: rows of embedding and output layer.
        policies: adapter and quantisation are read.
        tied: the output layer is the embedding.
        dora: adapters are DoRA's, with a magnitude per output.

    The matrices count as divided by tensor parallelism, vectors and adapters as kept whole.
    """
    trained = policies.adapter is None
    matrix = Tensor((vocabulary, hidden), trainable=trained, divided_dim=0)
    norm = Tensor((hidden,), trainable=trained)
    groups = tuple(_layer_group(layer, policies, dora=dora) for layer in layers)
    return ModelTensors((matrix,), groups, (norm,) if tied else (norm, matrix), tied)


def _layer_group(layer: LayerShape, policies: Policies, *, dora: bool) -> Group:
    adapter = policies.adapter
    base = Tensor((0,), trainable=adapter is None)
    linear = replace(base, quantised=policies.quantisation is not None, divided_dim=0)
    tensors = [replace(linear, shape=(each.outputs, each.inputs)) for each in layer.linears]
    tensors += [replace(base, shape=shape, divided_dim=1) for shape in layer.stacked]
    tensors += [replace(base, shape=(length,)) for length in layer.vectors]
    if adapter is not None:
        for each in layer.linears:
            if each.adapted:
                tensors += adapter_tensors(each.outputs, each.inputs, adapter.rank, dora=dora)
    return tuple(tensors)
