"""A saved adapter of peft on its base, of which nothing is in memory but what is being computed.

peft itself says what a layer computes with its adapter and what it is merged (LoRA, rsLoRA, DoRA,
embeddings, experts); only values come and go here. Input embedding and output layer are two
matrices, whatever the base has: an adapter on the one must not change the other. Knows nothing of
what is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit.engine.adapter import import_library
from tightfit.engine.tensor_plan import is_adapted
from tightfit.engine.whole_modules import ADAPTER_FILE
from tightfit.errors import InputError, UnsupportedError
from tightfit.training.saved_model import adapters_by_saved_name
from tightfit.training.streamed_forward import (
    PEFT_PREFIX,
    Values,
    fetch,
    give_up,
    places_in,
    plain_name,
)
from tightfit.training.tensor_file import TensorReader

_CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter's files.

    Attributes:
        config: peft's.
        files: its tensors, by the names that peft gives them.
    """

    folder: Path
    config: Any
    files: TensorReader

    @classmethod
    def open(cls, folder: Path) -> SavedAdapter:
        """Look at an adapter's folder.

        Raises:
            InputError: it holds none, or a broken one.
            UnsupportedError: it is of another kind than LoRA.
        """
        for name in (_CONFIG_FILE, ADAPTER_FILE):
            if not (folder / name).is_file():
                raise InputError(
                    f"{folder} holds no adapter: it has no {name}; name a checkpoint of a run with "
                    "finetuning_type: lora, or another folder that peft has written"
                )
        import_library()
        from peft import PeftConfig

        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise InputError(f"{folder / _CONFIG_FILE} cannot be read: {error}") from None
        if config.peft_type != "LORA":
            raise UnsupportedError(
                f"{folder} holds an adapter of {config.peft_type}; only LoRA, rsLoRA and DoRA can "
                "be merged here (peft's merge_and_unload may do it)"
            )
        return cls(folder, config, TensorReader([folder / ADAPTER_FILE]))

    def rows_of(self, path: str) -> int:
        """Of the matrix that it has in the place of the one at `path` of the base; 0 if none."""
        whole = f"{PEFT_PREFIX}{path}.weight"
        return self.files.shape(whole)[0] if whole in self.files.names else 0

    def touches(self, path: str) -> bool:
        """Whether it has anything for the module at `path` of the base."""
        return any(name.startswith(f"{PEFT_PREFIX}{path}.") for name in self.files.names)

    def unties(self, embedding: str, head: str) -> bool:
        """Whether the output layer of a model in which it is the embedding is not, with this.

        Args:
            embedding, head: their paths.

        Raises:
            UnsupportedError: it says that the two have one adapter.
        """
        if not (self.touches(embedding) or self.touches(head)):
            return False
        whole = [f"{PEFT_PREFIX}{path}.weight" for path in (embedding, head)]
        if set(whole) <= set(self.files.names):
            return not torch.equal(*map(self.files.read, whole))
        if getattr(self.config, "ensure_weight_tying", False):
            raise UnsupportedError(
                f"{self.folder} has one adapter for both {embedding} and {head} "
                "(ensure_weight_tying), which cannot be merged here; peft's merge_and_unload can"
            )
        return True


@dataclass
class AdapterOnBase:
    """A model of peft on the meta device, but for its adapters.

    Attributes:
        root: peft's model.
        model: that of transformers in it.
        base: values of the base.
    """

    root: Any
    model: PreTrainedModel
    base: Values
    _merged: dict[str, torch.Tensor] = field(default_factory=dict)  # of the layer asked for last

    @classmethod
    def open(cls, adapter: SavedAdapter, model: PreTrainedModel, base: Values) -> AdapterOnBase:
        """Put an adapter on a model that is on the meta device, its two ends untied.

        Raises:
            InputError: the adapter is that of another model.
        """
        from peft import get_peft_model

        adapter.config.ensure_weight_tying = False  # ends have a value each
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft's, of what is done otherwise here
                root = get_peft_model(model, adapter.config)
        except ValueError as error:
            raise InputError(f"{adapter.folder} is no adapter of this base: {error}") from None
        _fill(root, adapter)
        return cls(root.eval(), model, base)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, it computes what the base does."""
        with self.root.disable_adapter():
            yield

    @torch.no_grad()
    def merged(self, name: str) -> torch.Tensor:
        """What the model has for a parameter or buffer of this name without an adapter beside it,
        fp32; parameters of a module are best asked for one after the other."""
        path, _, own = name.rpartition(".")
        if name in self._merged:
            return self._merged[name]
        self._merged.clear()
        module = self.model.get_submodule(path)
        if is_adapted(module):
            self._merged.update(self._merge(module, path))
            return self._merged[name]
        trained = _trained_whole(module, own)
        return self.base(name) if trained is None else trained

    def _merge(self, layer: Any, path: str) -> dict[str, torch.Tensor]:
        """The parameters of the module that an adapter's layer, or several, are around."""
        inner, around = layer, []
        while is_adapted(inner):
            around.append(inner)
            inner = inner.base_layer
        places = places_in(inner, path)
        fetch(self.base, places)
        for each in around:
            each.merge(safe_merge=True)
            each.merged_adapters.clear()  # it is as it was when its values are given up
        values = {name: module.get_parameter(own).data for module, own, name in places}
        give_up(places)
        return values


def _trained_whole(module: nn.Module, own: str) -> torch.Tensor | None:
    """The value that the adapter's files have for a module's parameter; None if they have none."""
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        module = copies["default"]
    parameter = module._parameters.get(own)
    return None if parameter is None or parameter.is_meta else parameter.data


def _fill(root: nn.Module, adapter: SavedAdapter) -> None:
    """Read the adapter's values, fp32.

    Raises:
        InputError: some are missing or of another shape.
    """
    places = {
        parameter: (module, own)
        for module in root.modules()
        for own, parameter in module.named_parameters(recurse=False)
    }
    for name, parameter in adapters_by_saved_name(root).items():
        found = name in adapter.files.names
        if not found or adapter.files.shape(name) != tuple(parameter.shape):
            what = f"is of shape {list(adapter.files.shape(name))}" if found else "is missing"
            raise InputError(
                f"{adapter.folder} is no adapter of this base: {plain_name(name)} {what} where "
                f"{list(parameter.shape)} is wanted"
            )
        module, own = places[parameter]
        module._parameters[own] = nn.Parameter(adapter.files.read(name).float(), False)
