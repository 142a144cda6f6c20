"""What a model is saved as: Hugging Face's layout, or peft's for adapters, by parts of each rank.

Most weights are written as they are, every rank its own part. Those that files keep in other pieces
than the model (experts) are put together first, a layer at a time, and converted by transformers.
Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tightfit.engine.engine import Engine
from tightfit.engine.regions import boxes_of, place_in, whole
from tightfit.engine.whole_modules import whole_parameters
from tightfit.training.tensor_file import Entry, Part

_LAYER = re.compile(r".*?\.\d+\.")  # begins the names of all that is in one layer


@dataclass(frozen=True)
class FileNames:
    """What the tensors of a model are in its files.

    Attributes:
        entries: of files, each of the size of the whole.
        direct: by its name there what is saved as it is, by its name in the model.
        converted: names in the model of what is saved in other pieces; those of a layer together.
    """

    entries: list[Entry]
    direct: dict[str, str]
    converted: list[list[str]]

    @classmethod
    def of(cls, model: nn.Module) -> FileNames:
        """Those of a model of transformers, or of peft's around one."""
        shells = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in _saved_tensors(model).items()
        }
        shown = _shown(model, shells)
        names = {id(shell): name for name, shell in shells.items()}
        direct = {new: names[id(s)] for new, s in shown.items() if id(s) in names}
        left = set(names.values()) - set(direct.values()) if shown.keys() - direct.keys() else set()
        groups: dict[str, list[str]] = {}
        for name in sorted(left):
            layer = _LAYER.match(name)
            groups.setdefault(layer[0] if layer else "", []).append(name)
        entries = [Entry(name, s.dtype, tuple(s.shape)) for name, s in shown.items()]
        return cls(entries, direct, list(groups.values()))


@dataclass(frozen=True)
class SavedModel:
    """How the tensors of an engine's model are saved.

    Attributes:
        entries: of this rank's tensors, each of the size of the whole.
        direct: names in the file of parameters and buffers that are saved as they are.
        converted: others, by their names in the model; those of a layer stand together.
    """

    engine: Engine
    entries: list[Entry]
    direct: dict[str, torch.Tensor]
    converted: list[dict[str, torch.Tensor]]

    @classmethod
    def of(cls, engine: Engine) -> SavedModel:
        """What this rank saves."""
        tensors, names = _saved_tensors(engine.model), FileNames.of(engine.model)
        return cls(
            engine,
            names.entries,
            {new: tensors[old] for new, old in names.direct.items()},
            [{name: tensors[name] for name in group} for group in names.converted],
        )

    def parts(self) -> Iterator[Part]:
        """What this rank writes; ranks that share converted weights put them together here."""
        for name, tensor in self.direct.items():
            if writes(self.engine, tensor):
                values = self.engine.values(tensor)
                for box in boxes_of(tensor):
                    yield Part(name, box.of_whole, values[box.of_part])
        for group in self.converted:
            gathered = {name: self._whole(tensor) for name, tensor in group.items()}
            if self.engine.ranks.is_first:
                assert isinstance(self.engine.model, PreTrainedModel)
                for name, made in revert_weight_conversion(self.engine.model, gathered).items():
                    yield Part(name, whole(made), made)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.engine.values(tensor)
        if not isinstance(tensor, DTensor):
            return values
        return DTensor.from_local(
            values.to(self.engine.device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        ).full_tensor()


def writes(engine: Engine, tensor: torch.Tensor) -> bool:
    """Whether this rank is the one, of all that hold the same part of a tensor, that writes it."""
    if tensor in engine.ranks.copies:
        return False
    if not isinstance(tensor, DTensor):
        return engine.ranks.is_first
    pairs = zip(place_in(tensor.device_mesh), tensor.placements, strict=True)
    first = all(index == 0 for index, placement in pairs if placement.is_replicate())
    return first and engine.ranks.is_first_copy


def adapters_by_saved_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters of peft's model, by the names that they have in its files."""
    parameters = dict(model.named_parameters())
    shells = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
    names = {id(shell): name for name, shell in shells.items()}
    return {new: parameters[names[id(s)]] for new, s in _shown(model, shells).items()}


def is_adapted(engine: Engine) -> bool:
    """Whether adapters are all that is trained, and saved."""
    return not isinstance(engine.model, PreTrainedModel)


def save_configs(engine: Engine, folder: Path) -> None:
    """Write config.json and generation_config.json, or adapter_config.json.

    Raises:
        OSError: they could not be written.
    """
    model = engine.model
    if is_adapted(engine):
        _save_adapter_config(model, folder)
        return
    assert isinstance(model, PreTrainedModel)
    save_model_configs(model, folder)


def save_model_configs(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json and generation_config.json.

    Raises:
        OSError: they could not be written.
    """
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _save_adapter_config(model: nn.Module, folder: Path) -> None:
    """As peft does: adapters are loaded for inference unless somebody says otherwise."""
    config: Any = model.peft_config["default"]  # type: ignore[index]
    training, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = training


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, once each, and buffers that belong to a state dict; which is not asked, as it
    would read what is on a disk."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for path, module in model.named_modules():
        own = module._non_persistent_buffers_set
        ignored |= {f"{path}.{name}" if path else name for name in own}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if name not in ignored}


def _shown(model: nn.Module, shells: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`shells` by the names of the files: the same tensors where only the name is another."""
    if isinstance(model, PreTrainedModel):
        shown: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(shells))
        return shown
    from peft import get_peft_model_state_dict  # takes a second to import, only LoRA needs it

    of_adapters: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(shells), save_embedding_layers=False
    )
    whole = {parameter: name for name, parameter in model.named_parameters()}
    return of_adapters | {
        name: shells[whole[parameter]] for name, parameter in whole_parameters(model).items()
    }
