"""Tensor parallelism: ranks that share each layer's matrices (https://arxiv.org/abs/1909.08053).

Each parameter becomes a DTensor on the mesh's tensor dimension, divided as the model's own plan
says or whole on every rank; `fully_shard` then shards what a rank has further. Forwards compute
with the local parts (`tensor_styles.py`). A group computes with one batch: hidden states are whole
between layers, heads and inner widths divided, and the loss is that of all ranks (`vocabulary.py`).

Keys and values of fewer heads than ranks are whole on every rank, which computes its head only.
Gradients of what is whole are the same on every rank of a group, to the bit, because every sum is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.collectives import enter, own_part, own_range
from tightfit.engine.layers import Absent
from tightfit.engine.mesh import Dimension, Mesh
from tightfit.engine.quantisation import QuantisedLinear
from tightfit.engine.tensor_dropout import PartOfDropout
from tightfit.engine.tensor_plan import (
    base_layer,
    check_sizes,
    head_size,
    heads_of,
    is_adapted,
    plan_of,
)
from tightfit.engine.tensor_styles import (
    Columns,
    Cut,
    EmbeddingRows,
    Entrance,
    Experts,
    PartialGradient,
    RepeatedColumns,
    Rows,
    Style,
    install,
)
from tightfit.engine.vocabulary import Vocabulary


def apply_tensor_parallel(root: nn.Module, model: PreTrainedModel, mesh: Mesh) -> Vocabulary:
    """Divide `root` among the ranks of the tensor dimension; which logits this one has.

    All ranks have the same model. Random numbers go on as on the group's first rank, so that what
    is whole is dropped alike.

    Args:
        root: what is called in training: the model, or peft's wrapping of it.
        model: the model of transformers in it.

    Raises:
        UnsupportedError: the model has no plan, or it cannot be divided by so many ranks.
    """
    if mesh.size(Dimension.TENSOR) == 1:
        return Vocabulary()
    group = mesh.group(Dimension.TENSOR)
    plan = plan_of(model)
    check_sizes(model, plan, group.size())
    styles = _styles(root, model, plan, group)
    for module, style in styles.items():
        style.prepare(module)
    head = base_layer(model.get_output_embeddings())
    rows = 0 if isinstance(head, Absent) else head.out_features
    first, _ = own_range(rows, group.size(), group.rank())
    _divide(styles, mesh.part(Dimension.TENSOR))
    for module, style in styles.items():
        install(module, style)
    _fewer_heads(model, plan, group.size())
    _draw_alike(group, mesh.device)
    return Vocabulary(first, group)


def divided_dims(root: nn.Module, model: PreTrainedModel, ranks: int) -> dict[nn.Parameter, int]:
    """Along which dimension so many ranks divide each parameter; others are whole on every rank.

    The model, which may be on the meta device, is for nothing else afterwards.

    Raises:
        UnsupportedError: as of `apply_tensor_parallel`.
    """
    plan = plan_of(model)
    check_sizes(model, plan, ranks)
    nobody = dist.ProcessGroup(0, ranks)  # type: ignore[call-arg]  # has a size and no way to talk
    dims = {}
    for module, style in _styles(root, model, plan, nobody).items():
        for name, parameter in module.named_parameters(recurse=False):
            cut = style.cut(name, parameter)
            if cut is not None:
                dims[parameter] = cut.dim
    return dims


def _styles(
    root: nn.Module, model: PreTrainedModel, plan: dict[str, str], group: dist.ProcessGroup
) -> dict[nn.Module, Style]:
    """That of every module that has parameters of its own."""
    styles = _Styles(model, group).of(plan)
    others = [m for m in root.modules() if m._parameters and m not in styles]
    return styles | {module: Style(group) for module in others}


class _Styles:
    """Makes the styles of one model's modules."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
        self._model = model
        self._group = group
        self._entrances: dict[str, Entrance] = {}

    def of(self, plan: dict[str, str]) -> dict[nn.Module, Style]:
        """By module, those that peft has added included."""
        styles: dict[nn.Module, Style] = {}
        for name, word in plan.items():
            module = self._model.get_submodule(name)
            styles[base_layer(module)] = self._style(name, word)
            if is_adapted(module):
                styles |= dict(self._adapters(name, module, word))
        return styles

    def _style(self, name: str, word: str) -> Style:
        if word.startswith("colwise"):
            return self._columns(name, word, self._entrance(name))
        if word.startswith("rowwise"):
            return Rows(self._group, splits=word == "rowwise_split_input")
        others = {
            "embedding_rowwise": EmbeddingRows,
            "moe_tp_experts": Experts,
            "replicated_with_grad_allreduce": PartialGradient,
        }
        return others[word](self._group)

    def _columns(self, name: str, word: str, entrance: Any) -> Columns:
        ranks = self._group.size()
        if word == "colwise" and name.endswith((".k_proj", ".v_proj")):
            heads, width = heads_of(self._model, name), head_size(self._model, name)
            if heads % ranks:
                own = self._group.rank() * heads // ranks
                rows = slice(own * width, (own + 1) * width)
                return RepeatedColumns(self._group, entrance, rows)
        return Columns(self._group, entrance, gathers=word == "colwise_gather_output")

    def _entrance(self, name: str) -> Entrance:
        """One for all layers of the same module around them."""
        around = name.rpartition(".")[0]
        if around not in self._entrances:
            self._entrances[around] = Entrance(self._model.get_submodule(around), self._group)
        return self._entrances[around]

    def _adapters(self, name: str, layer: Any, word: str) -> Iterator[tuple[nn.Module, Style]]:
        """LoRA's two linear layers: where the base's outputs are divided B is, else A."""
        for adapter in layer.lora_A:
            first, second = layer.lora_A[adapter], layer.lora_B[adapter]
            if word.startswith("colwise"):
                yield second, self._columns(name, word, lambda x: enter(x, self._group))
                continue
            yield first, self._style(name, word)
            dropout = layer.lora_dropout[adapter]
            if isinstance(dropout, nn.Dropout) and word == "rowwise":
                layer.lora_dropout[adapter] = PartOfDropout(
                    dropout.p, first.in_features, self._group
                )


def _divide(styles: dict[nn.Module, Style], mesh: DeviceMesh) -> None:
    """Put this rank's part in the place of each parameter; tied ones stay tied."""
    divided: dict[nn.Parameter, tuple[nn.Parameter, Cut | None]] = {}
    for module, style in styles.items():
        packed: set[nn.Parameter] = set()
        if isinstance(module, QuantisedLinear):
            _keep_part(module, style)
            packed.update(module.quantised_parameters())
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in packed:
                continue
            cut = style.cut(name, parameter)
            if parameter not in divided:
                divided[parameter] = _divided(parameter, cut, mesh), cut
            replacement, its_cut = divided[parameter]
            assert its_cut == cut, f"{name} is tied to what is divided otherwise"
            module._parameters[name] = replacement


def _keep_part(layer: QuantisedLinear, style: Style) -> None:
    """Leave a rank its part of a frozen 4-bit weight, in plain tensors: nobody saves or sums it."""
    sizes = layer.out_features, layer.in_features
    parts = [slice(0, size) for size in sizes]
    cut = style.cut("weight", layer.weight)
    if isinstance(style, RepeatedColumns):
        parts[0] = style.rows
    elif cut is not None:
        first, size = own_range(sizes[cut.dim], style.group.size(), style.group.rank())
        parts[cut.dim] = slice(first, first + size)
    layer.keep(*parts)


def _divided(parameter: nn.Parameter, cut: Cut | None, mesh: DeviceMesh) -> nn.Parameter:
    """A rank's part of one parameter, in memory of its own where it is not all."""
    whole = parameter.detach()
    placement: Placement = Replicate()
    part = whole
    if cut is not None:
        placement = Shard(cut.dim)
        if cut.pieces > 1:
            placement = _StridedShard(cut.dim, split_factor=cut.pieces)
        group = mesh.get_group()
        with ledger.labelled(Kind.PARAMETERS):
            pieces = [own_part(p, cut.dim, group) for p in whole.chunk(cut.pieces, cut.dim)]
            part = torch.cat(pieces, cut.dim)
    shared = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(shared, requires_grad=parameter.requires_grad)


def _fewer_heads(model: PreTrainedModel, plan: dict[str, str], ranks: int) -> None:
    """Tell attention how many of a rank's query heads share its key head, where keys repeat."""
    for name, word in plan.items():
        if word == "colwise" and name.endswith(".k_proj") and heads_of(model, name) % ranks:
            attention: Any = model.get_submodule(name.rpartition(".")[0])
            queries = heads_of(model, name.removesuffix("k_proj") + "q_proj")
            attention.num_key_value_groups = queries // ranks


def _draw_alike(group: dist.ProcessGroup, device: torch.device) -> None:
    """Take the random state of the group's first rank."""
    with _disable_current_modes():
        state = torch.get_rng_state().to(device)
        dist.broadcast(state, group=group, group_src=0)
        torch.set_rng_state(state.cpu())
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device).to(device)
            dist.broadcast(state, group=group, group_src=0)
            torch.cuda.set_rng_state(state.cpu(), device)
