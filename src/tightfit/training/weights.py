"""Reads a model's weights out of safetensors files, one parameter, or a part of one, at a time.

Checkpoints may name weights otherwise than the model does, or keep what it has in one piece in
several (experts one by one) or the other way round; transformers knows which do and how they are
converted, and its rules are applied here to one parameter at a time. Tensors are read from the
mapped file, so that several ranks of a machine share its pages. Knows nothing of where values go.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tightfit.engine.regions import Region
from tightfit.errors import InputError, ModelNotFoundError
from tightfit.training.tensor_file import TensorReader

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMED_TENSORS = 3  # how many a message lists
_ROWS_COMPARED = 4096  # at a time


@dataclass
class _Recipe:
    """How tensors of the files become weights of the model.

    Attributes:
        converter: of transformers; None where the one source is the weight.
        sources: names in the files, each with the converter's pattern that it matched.
    """

    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)


class CheckpointWeights:
    """Fills the parameters of a model, and the buffers that are saved with it.

    Args:
        model: on the meta device; what is filled is told by its names.
        grown: whether the model's vocabulary may have more rows than the files: each of those is
            the mean of the rows there are, as transformers makes them but for its noise.

    Raises:
        ModelNotFoundError: there are no weights.
        InputError: they are broken, or those of another model.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, *, grown: bool = False) -> None:
        self._may_grow = _vocabulary(model) if grown else frozenset()
        self._means: dict[str, torch.Tensor] = {}  # of rows, by names in the files
        self._folder = folder
        self._files = TensorReader(_files(folder))
        self._model = model
        self._made: dict[str, torch.Tensor] = {}  # together with what was asked for last
        wanted = model.state_dict()
        recipes = _recipes(self._files.names, model, wanted)
        self._recipe_of = self._check(recipes, wanted)
        self._wanted = {name: tuple(tensor.shape) for name, tensor in wanted.items()}

    @property
    def grows(self) -> bool:
        """Whether the model has rows that the files have not."""
        return any(
            self._recipe_of[name].converter is None
            and self._files.shape(self._recipe_of[name].sources[0][0]) != self._wanted[name]
            for name in self._may_grow
        )

    def __call__(self, name: str, values: torch.Tensor, region: Region) -> None:
        """Fill `values` with a region of the weight that the model calls `name`."""
        recipe = self._recipe_of[name]
        if name not in self._made:
            self._made.clear()
        if recipe.converter is None:
            self._read(recipe.sources[0][0], values, region)
            return
        if name not in self._made:
            self._made.update(self._convert(name, recipe, on_meta=False))
        values.copy_(self._made[name][region])

    def _read(self, source: str, values: torch.Tensor, region: Region) -> None:
        """Read a region of a tensor, beyond whose rows is their mean."""
        rows = self._files.shape(source)[0] if values.dim() else 0
        first, end = (region[0].start, region[0].stop) if values.dim() else (0, 0)
        if end <= rows:
            values.copy_(self._files.read(source, region))
            return
        there = max(0, rows - first)
        if there:
            values[:there].copy_(self._files.read(source, (slice(first, rows), *region[1:])))
        if source not in self._means:
            self._means[source] = self._mean(source, rows)
        values[there:].copy_(self._means[source][region[1:]])

    def _mean(self, source: str, rows: int) -> torch.Tensor:
        """Of a tensor's rows, fp32."""
        total = torch.zeros(self._files.shape(source)[1:], dtype=torch.float64)
        for start in range(0, rows, _ROWS_COMPARED):
            part = (slice(start, min(start + _ROWS_COMPARED, rows)),)
            total += self._files.read(source, part).double().sum(0)
        return (total / rows).float()

    def _fits(self, name: str, found: tuple[int, ...] | None, wanted: torch.Size) -> bool:
        """Whether a tensor of the files is one of the model."""
        if found is None or name not in self._may_grow:
            return found == tuple(wanted)
        return found[1:] == tuple(wanted[1:]) and found[0] <= wanted[0]

    def _convert(self, name: str, recipe: _Recipe, *, on_meta: bool) -> dict[str, torch.Tensor]:
        """All weights that the recipe gives, whole."""
        converter = deepcopy(recipe.converter)
        assert converter is not None
        for source, pattern in recipe.sources:
            shape = self._files.shape(source)
            tensor = torch.empty(shape, device="meta") if on_meta else self._files.read(source)
            converter.add_tensor(name, source, pattern, tensor)  # type: ignore[arg-type]
        made = converter.convert(name, model=self._model, config=self._model.config)
        return {key: t[0] if isinstance(t, list) else t for key, t in made.items()}

    def _check(
        self, recipes: Mapping[str, _Recipe], wanted: Mapping[str, torch.Tensor]
    ) -> dict[str, _Recipe]:
        """The recipe of each weight.

        Raises:
            InputError: there is none for some, or it gives another shape.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        recipe_of: dict[str, _Recipe] = {}
        for name, recipe in recipes.items():
            if recipe.converter is None:
                made = {name: self._files.shape(recipe.sources[0][0])}
            else:
                converted = self._convert(name, recipe, on_meta=True)
                made = {key: tuple(tensor.shape) for key, tensor in converted.items()}
            shapes |= made
            recipe_of |= dict.fromkeys(made, recipe)
        wrong = []
        for names in _tied(self._model, wanted):
            found = [n for n in names if self._fits(n, shapes.get(n), wanted[n].shape)]
            self._check_equal(found)
            recipe_of |= {name: recipe_of[found[0]] for name in names if found}
            wrong += [] if found else [names[0]]
        if wrong:
            raise InputError(
                f"the weights in {self._folder} are not those of its config.json: "
                f"{len(wrong)} tensors are missing or of another shape, such as "
                f"{', '.join(wrong[:_NAMED_TENSORS])}"
            )
        return recipe_of

    def _check_equal(self, names: list[str]) -> None:
        """Weights that the model ties are equal where the files have several of them.

        Raises:
            InputError: they differ.
        """
        for other in names[1:]:
            rows = self._files.shape(other)[0]
            for start in range(0, rows, _ROWS_COMPARED):
                region = (slice(start, min(start + _ROWS_COMPARED, rows)),)
                if not torch.equal(*(self._files.read(n, region) for n in (names[0], other))):
                    raise InputError(
                        f"config.json in {self._folder} ties {names[0]} and {other}, which "
                        "differ in its weights; say tie_word_embeddings: false there"
                    )


def _vocabulary(model: PreTrainedModel) -> frozenset[str]:
    """The names of what has a row for each token."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {parameter for end in ends for parameter in end.parameters(recurse=False)}
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter in own)


def _files(folder: Path) -> list[Path]:
    """The files with weights.

    Raises:
        ModelNotFoundError: there are none.
        InputError: the index of them is broken, or names one that is not there.
    """
    index = folder / _INDEX_FILE
    if not index.is_file():
        if (folder / _SINGLE_FILE).is_file():
            return [folder / _SINGLE_FILE]
        raise ModelNotFoundError(
            f"no weights of a causal language model in {folder}: it has neither {_SINGLE_FILE} nor "
            f"{_INDEX_FILE}"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{index} is broken: {error}; get it again") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{index} names {missing[0]}, which is not there; get it again")
    return [folder / name for name in names]


def _recipes(
    sources: Iterable[str], model: PreTrainedModel, wanted: Mapping[str, torch.Tensor]
) -> dict[str, _Recipe]:
    """By the (first) weight that each gives, as transformers' own loader matches names."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    recipes: dict[str, _Recipe] = {}
    for source in sorted(sources, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, dict(wanted))
        if name not in wanted and source in wanted:
            name, pattern = source, None
        if name not in wanted:
            continue  # what the model has no use for
        converter = None if pattern is None else by_pattern[pattern]
        recipe = recipes.setdefault(name, _Recipe(converter))
        recipe.sources.append((source, pattern or source))
    # Saving reverses what was used in loading.
    used = [each for each in transforms if each.was_used()]
    model._weight_conversions = used  # type: ignore[assignment]
    return recipes


def _tied(model: nn.Module, wanted: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of each weight of `wanted`: several where modules share it."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    shared = list(names.values())
    known = {name for each in shared for name in each}
    return [*shared, *([name] for name in wanted if name not in known)]
