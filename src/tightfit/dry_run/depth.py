"""Which depths are run in place of a model's own, and the straight line from them to it.

Where all layers are of one type two depths next to each other are enough: middle layers lie on
the line between the first and the last and are never above both. Where types take turns, whole
rounds of them are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from tightfit.bill.table import Kind
from tightfit.dry_run.config import load_config
from tightfit.ledger import Kinds

SHALLOW = 2  # the first depth at which the first and the last layer differ


@dataclass(frozen=True)
class Depths:
    """Two depths to run, and how many times their difference leads from the second to the whole.

    `steps` is 0 where the model is run whole: it has too few layers to leave any out.
    """

    few: int
    more: int
    steps: int


def depths_of(config: PretrainedConfig, shallow: int = SHALLOW, *, every: int = 1) -> Depths:
    """The smallest depths that stand for `config`'s own.

    Args:
        shallow: layers before the run is in its steady state.
        every: after how many layers what is done to them repeats.

    Layers of a model are some of their own kind (dense ones before the experts begin) and then
    rounds that repeat. Both depths are whole rounds away from the model's own, so that the last
    layer is of the same kind in all three.
    """
    depth = config.num_hidden_layers
    own, period = rounds_of(config, every=every)
    few = own + fewest_layers(depth - own, shallow, period)
    if depth <= few + period:
        return Depths(depth, depth, 0)
    return Depths(few, few + period, (depth - few) // period - 1)


def rounds_of(config: PretrainedConfig, *, every: int = 1) -> tuple[int, int]:
    """How many layers come before the rounds begin, and how many layers a round has.

    Args:
        every: after how many layers what is done to them repeats.
    """
    signatures = enumerate(layer_signatures(config))
    return prefix_and_period([(*signature, index % every) for index, signature in signatures])


def fewest_layers(length: int, shallow: int, period: int) -> int:
    """Layers that stand for `length` of them, whole rounds fewer: so many, and a round where layers
    differ, before the run is in its steady state."""
    least = shallow if period == 1 else period + shallow
    return min(length, least + (length - least) % period)


def layer_signatures(config: PretrainedConfig) -> list[tuple[Any, ...]]:
    """What the config says of each layer; layers of one kind have equal signatures."""
    depth = config.num_hidden_layers
    patterns = layer_patterns(config).values()
    dense_first = getattr(config, "first_k_dense_replace", None) or 0
    sparse_step = getattr(config, "decoder_sparse_step", None) or 1
    dense_only = getattr(config, "mlp_only_layers", None) or []
    return [
        (
            *(str(pattern[index]) for pattern in patterns),
            index < dense_first,
            (index + 1) % sparse_step == 0 and index not in dense_only,
        )
        for index in range(depth)
    ]


def layer_patterns(config: PretrainedConfig) -> dict[str, list[Any]]:
    """The fields of a config that say something about each layer, such as `layer_types`."""
    depth = config.num_hidden_layers
    return {
        key: value
        for key, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == depth and key != "mlp_only_layers"
    }


def prefix_and_period(signatures: list[tuple[Any, ...]]) -> tuple[int, int]:
    """How many layers come before the rounds begin, and how many layers a round has.

    Of all descriptions the one with the fewest layers in prefix and round together.
    """
    depth = len(signatures)
    found = (
        (prefix, period)
        for length in range(1, depth + 1)
        for period in range(1, length + 1)
        for prefix in (length - period,)
        if all(signatures[i] == signatures[i + period] for i in range(prefix, depth - period))
    )
    return next(found)


def extrapolate(few: Kinds, more: Sequence[tuple[Kinds, int]]) -> Kinds:
    """Each kind, so many differences to each of `more` beyond `few`."""
    kinds = {
        kind: few.get(kind, 0)
        + sum(steps * (its.get(kind, 0) - few.get(kind, 0)) for its, steps in more)
        for kind in Kind
    }
    return {kind: count for kind, count in kinds.items() if count}


def with_depth(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy of `config` with its first `layers` layers."""
    cut = {key: value[:layers] for key, value in layer_patterns(config).items()}
    return load_config({**config.to_dict(), "num_hidden_layers": layers, **cut})
