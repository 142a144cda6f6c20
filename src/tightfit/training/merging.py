"""Merges a saved adapter into its base: a model folder like any other, and a proof that it is one.

Tensors are merged and written one at a time (experts that files keep one by one, a layer at a
time), so that no more of a model is in memory. What was written is then read again and computes the
logits of a few tokens, which must be those of the base with the adapter beside it; only then does
the folder get its name. Of a base whose output layer is its embedding, an adapter on one of the two
changes that one: the merged model has both matrices and says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from tightfit.engine.precision import DTYPES
from tightfit.engine.quantisation import dequantised_again, linear_layers
from tightfit.engine.regions import whole
from tightfit.engine.unloaded import make_buffers
from tightfit.errors import ConfigError, ModelNotFoundError, TrainingError
from tightfit.facts.disk import check_writable
from tightfit.facts.model_files import model_folder
from tightfit.policies import QuantisationPolicy
from tightfit.training.adapter_on_base import AdapterOnBase, SavedAdapter
from tightfit.training.checkpoint_folders import flush, unfinished
from tightfit.training.layout import WEIGHTS_FILE, split_files, write_index
from tightfit.training.model import open_model
from tightfit.training.saved_model import FileNames, save_model_configs
from tightfit.training.streamed_forward import Values, logits
from tightfit.training.tensor_file import Part, TensorWriter, lay_out
from tightfit.training.tokenizer import load_tokenizer
from tightfit.training.weights import CheckpointWeights

CHECKED_TOKENS = 16
TOLERANCE = 5e-4  # of the largest logit: what sums in fp32 may differ by


@dataclass(frozen=True)
class Merged:
    """What came of it.

    Attributes:
        folder: of the merged model.
        base: that it was merged into.
        dtype: of the merged weights.
        untied: whether the base's output layer is its embedding and the merged model's is not.
        difference: largest of a logit between the merged model and the base with its adapter.
        error: the part of it that is not the rounding of merged weights to 16 bits.
        allowed: the largest that the error may be.
        change: largest of a logit that the adapter makes.
    """

    folder: Path
    base: str
    dtype: torch.dtype
    untied: bool
    difference: float
    error: float
    allowed: float
    change: float


def merge_adapter(
    adapter: Path,
    folder: Path,
    *,
    base: str | None = None,
    precision: str = "auto",
    bits: int | None = None,
) -> Merged:
    """Merge the adapter in `adapter` and write the model to `folder`, which is new.

    Args:
        base: the model; the one that the adapter names, when None.
        precision: of what is written, `auto`: the base's.
        bits: 4: the base is quantised and dequantised first, as it was where the adapter was
            trained on it.

    Raises:
        ConfigError: there is something at `folder`, or no base is named.
        InputError: adapter or base are missing, broken or not of each other.
        TrainingError: it cannot be written, or computes something else.
    """
    check_target(folder)
    saved = SavedAdapter.open(adapter)
    name = base or saved.config.base_model_name_or_path
    if not name:
        raise ConfigError(f"{adapter} does not say what its base is: --model_name_or_path MODEL")
    merging = _Merging.open(saved, name, precision, bits)
    temporary = unfinished(folder)
    try:
        merging.write(temporary)
        found = merging.check(temporary, folder)
        temporary.rename(folder)
        flush([folder.parent])
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return found


def check_target(folder: Path) -> None:
    """See that a model can be written there.

    Raises:
        ConfigError: something is there already, or the folder may not be written to.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already; name a folder that is new")
    check_writable("OUTPUT_DIR", folder.parent)


@dataclass(frozen=True)
class _Merging:
    """An adapter on its base, and what the merged model is to be.

    Attributes:
        plain: the merged model on the meta device, of the type that is written.
        adapted: fp32.
    """

    saved: SavedAdapter
    base: str
    plain: PreTrainedModel
    adapted: AdapterOnBase
    untied: bool

    @classmethod
    def open(cls, saved: SavedAdapter, base: str, precision: str, bits: int | None) -> _Merging:
        """Open the base twice, without values: as it is written, and as it computes."""
        dtype, changed = _type_of(base, precision), {}
        plain, weights = open_model(base, dtype)
        resized = saved.rows_of(_path(plain, _ends(plain)[0]))
        if resized > plain.config.get_text_config().vocab_size:
            changed = {"vocab_size": resized}
            plain, weights = open_model(base, dtype, changed)
        computing, _ = open_model(base, torch.float32, changed)
        values = _base_values(computing, weights, bits)
        embedding, head = (_path(plain, end) for end in _ends(plain))
        tied = len({end.weight for end in _ends(plain)}) == 1
        untied = tied and saved.unties(embedding, head)
        _untie(computing)
        if untied:
            _untie(plain)
        make_buffers(computing, torch.device("cpu"), weights)
        return cls(saved, base, plain, AdapterOnBase.open(saved, computing, values), untied)

    def write(self, folder: Path) -> None:
        """Write the merged model.

        Raises:
            OSError: there is no room, or the disk refuses.
        """
        names = FileNames.of(self.plain)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_model_configs(self.plain, folder)
        self._save_tokenizer(folder)
        files = {folder / n: own for n, own in split_files({WEIGHTS_FILE: names.entries}).items()}
        write_index(folder, files)
        for path, entries in files.items():
            lay_out(path, entries)
        with TensorWriter(files) as writer:
            writer.write(self._parts(names))
        flush([*folder.iterdir(), folder])

    def _parts(self, names: FileNames) -> Iterator[Part]:
        types = {name: tensor.dtype for name, tensor in self.plain.state_dict().items()}
        for name, old in names.direct.items():
            values = self.adapted.merged(old).to(types[old])
            yield Part(name, whole(values), values)
        for group in names.converted:
            pieces = {old: self.adapted.merged(old).to(types[old]) for old in group}
            for name, values in revert_weight_conversion(self.plain, pieces).items():
                yield Part(name, whole(values), values)

    def _save_tokenizer(self, folder: Path) -> None:
        """The adapter's, which may have its own chat template, else the base's, if there is one."""
        for place in (self.saved.folder, model_folder(self.base)):
            try:
                load_tokenizer(place).save_pretrained(folder)
            except ModelNotFoundError:
                continue
            return

    def check(self, written: Path, folder: Path) -> Merged:
        """Hold what was written against the base with its adapter.

        Args:
            folder: what the model will be called.

        Raises:
            TrainingError: it computes something else.
        """
        adapted, dtype = self.adapted, self.plain.dtype
        last = int(self.plain.config.get_text_config().vocab_size) - 1
        tokens = torch.linspace(0, last, CHECKED_TOKENS).long()[None]
        expected = logits(adapted.root, adapted.base, tokens)
        with adapted.without_adapter():
            before = logits(adapted.root, adapted.base, tokens)
        model, weights = open_model(written, torch.float32)
        make_buffers(model, torch.device("cpu"), weights)
        found = logits(model, _base_values(model, weights, None), tokens)
        exact = rounded = logits(model, adapted.merged, tokens)
        if dtype is not torch.float32:
            rounded = logits(model, lambda name: adapted.merged(name).to(dtype), tokens)
        merged = Merged(
            folder,
            self.base,
            dtype,
            self.untied,
            difference=_largest(found - expected),
            error=max(_largest(exact - expected), _largest(found - rounded)),
            allowed=TOLERANCE * _largest(expected),
            change=_largest(expected - before),
        )
        if not merged.error <= merged.allowed:
            raise TrainingError(
                f"the merged model computes other logits than {self.base} with the adapter of "
                f"{self.saved.folder}: they are off by up to {merged.error:.3g}, where "
                f"{merged.allowed:.3g} would be rounding; it was not kept"
            )
        return merged


def _largest(differences: torch.Tensor) -> float:
    return float(differences.abs().max())


def _type_of(base: str, precision: str) -> torch.dtype:
    """Of the weights that are written."""
    if precision != "auto":
        return DTYPES[precision]
    found = AutoConfig.from_pretrained(model_folder(base)).dtype
    return found if found in DTYPES.values() else torch.float32


def _base_values(model: PreTrainedModel, weights: CheckpointWeights, bits: int | None) -> Values:
    """Reads parameters and buffers whole, fp32; those of linear layers as a base of `bits` bits has
    them."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    packed: dict[str, bool] = {}  # weights, by whether they are `[in, out]`
    policy = QuantisationPolicy() if bits is None else QuantisationPolicy(bits)
    for parent, own in [] if bits is None else linear_layers(model):
        layer = getattr(parent, own)
        packed[f"{_path(model, layer)}.weight"] = isinstance(layer, Conv1D)

    def read(name: str) -> torch.Tensor:
        values = torch.empty(shapes[name], dtype=torch.float32)
        weights(name, values, whole(values))
        if name not in packed:
            return values
        rows_first = values.T if packed[name] else values
        made = dequantised_again(rows_first, policy)
        return made.T.contiguous() if packed[name] else made

    return read


def _ends(model: PreTrainedModel) -> list[Any]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _path(model: nn.Module, module: nn.Module) -> str:
    paths: dict[nn.Module, str] = {other: path for path, other in model.named_modules()}
    return paths[module]


def _untie(model: PreTrainedModel) -> None:
    """Give the output layer a matrix of its own, on the meta device."""
    embedding, head = _ends(model)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
