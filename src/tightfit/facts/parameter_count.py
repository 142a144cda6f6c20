"""What a model's parameters are counted in: layers, their linear maps, their experts.

Adds up; does not know how any architecture is built (`families.py` does) nor how wide a number is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tightfit.errors import ConfigError


@dataclass(frozen=True)
class Linear:
    """One `nn.Linear`, or GPT-2's `Conv1D`.

    Attributes:
        name: the last part of its module's path.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """Parameters without the bias."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Parameters with the bias."""
        return self.weights + self.bias * self.outputs


@dataclass(frozen=True)
class StackedWeights:
    """Weights of all experts of a layer in one tensor `[count, outputs, inputs]`, or a router's.

    transformers 5 keeps them as plain parameters, not as linear layers.

    Attributes:
        targets: the names by which peft adapts them, all together: `gate_proj` and `up_proj` are
            one tensor. Empty where peft has no way to.
    """

    count: int
    inputs: int
    outputs: int
    targets: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters of all experts."""
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer, or of a part of it; parts are added with `+`.

    Attributes:
        other: parameters of norms, biases and the like.
        idle: parameters of the experts that one token does not use.
    """

    linears: tuple[Linear, ...] = ()
    stacked: tuple[StackedWeights, ...] = ()
    other: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        linears = sum(linear.parameters for linear in self.linears)
        stacked = sum(weights.parameters for weights in self.stacked)
        return linears + stacked + self.other

    @property
    def active(self) -> int:
        """Parameters that take part in one token's forward."""
        return self.total - self.idle

    def __add__(self, part: LayerParameters) -> LayerParameters:
        return LayerParameters(
            self.linears + part.linears,
            self.stacked + part.stacked,
            self.other + part.other,
            self.idle + part.idle,
        )


@dataclass(frozen=True)
class ParameterCounts:
    """The parameters of a causal language model.

    Attributes:
        embedding: of tokens.
        head: what the output layer has to itself; 0 when it is the embedding.
        outside: what belongs to no layer: position tables, the final norm.
    """

    embedding: int
    head: int
    outside: LayerParameters
    layers: tuple[LayerParameters, ...]

    @property
    def other(self) -> int:
        """Parameters outside embedding, output layer and layers."""
        return self.outside.total

    @property
    def total(self) -> int:
        """All parameters, a tied embedding once."""
        return self._outside_layers + sum(layer.total for layer in self.layers)

    @property
    def active(self) -> int:
        """Parameters of one token's forward: all but the experts it is not sent to.

        The whole embedding counts, as in most model cards.
        """
        return self._outside_layers + sum(layer.active for layer in self.layers)

    @property
    def largest_layer(self) -> int:
        """Parameters of the layer with most."""
        return max(layer.total for layer in self.layers)

    @property
    def _outside_layers(self) -> int:
        return self.embedding + self.head + self.other

    @property
    def parts(self) -> Iterator[LayerParameters]:
        """What has linear maps: the layers, and what is outside of them."""
        yield self.outside
        yield from self.layers


def lora_parameters(
    counts: ParameterCounts, rank: int, targets: Sequence[str] = (), *, dora: bool = False
) -> int:
    """Parameters that peft adds.

    A linear map gets `rank` x (inputs + outputs), and DoRA `outputs` more. Experts that are kept in
    one tensor get as much each, with the rank times the number of targets in the tensor; where peft
    finds a target among experts it looks for it nowhere else.

    Args:
        targets: last parts of module paths; empty for all linear maps but the output layer.

    Raises:
        ConfigError: a target is not there, or one of a pair that only goes together is missing.
    """
    stacked = [weights for part in counts.parts for weights in part.stacked if weights.targets]
    in_stacks = {name for weights in stacked for name in weights.targets}
    linears = [
        linear for part in counts.parts for linear in part.linears if linear.name not in in_stacks
    ]
    names = in_stacks | {linear.name for linear in linears}
    wanted = {target.rpartition(".")[2] for target in targets} or names
    _check_targets(wanted, names, stacked)
    count = sum(
        rank * (linear.inputs + linear.outputs) + dora * linear.outputs
        for linear in linears
        if linear.name in wanted
    )
    return count + sum(
        weights.count * rank * len(weights.targets) * (weights.inputs + weights.outputs)
        for weights in stacked
        if wanted.issuperset(weights.targets)
    )


def _check_targets(wanted: set[str], names: set[str], stacked: Iterable[StackedWeights]) -> None:
    missing = sorted(wanted - names)
    if missing:
        raise ConfigError(
            f"lora_target {', '.join(missing)}: no such module in the model; "
            f"its linear layers are {', '.join(sorted(names))}"
        )
    for weights in stacked:
        named = wanted.intersection(weights.targets)
        if named and len(named) < len(weights.targets):
            raise ConfigError(
                f"lora_target {', '.join(sorted(named))}: the experts keep "
                f"{' and '.join(weights.targets)} in one tensor; name all or none"
            )


def quantisable_parameters(counts: ParameterCounts) -> int:
    """Weights that a 4-bit or 8-bit base packs: those of linear layers but the output layer.

    Experts that are kept in one tensor are no linear layers and stay as they are.
    """
    return sum(linear.weights for part in counts.parts for linear in part.linears)
