"""A model as one stage of a pipeline: what other stages have is taken out of it.

Any decoder whose base model has a `base_model_pp_plan` will do; only the names in it are used. A
stage has one run of the layers, or several that are not neighbours (chunks), one of which computes
in a call. The list of layers keeps its length, as configs say by number what a layer is like. The
first chunk of all takes tokens, the others take hidden states in place of embeddings; what a model
does to embeddings before its first layer (Gemma scales them) was done by the first. The last one is
the whole causal language model from there on, so that whatever is done to logits is done; the
others return hidden states. Knows nothing of what stages send each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tightfit.bill.stages import stage_layers
from tightfit.engine.layers import Absent, decoder_layers
from tightfit.engine.tensor_plan import is_adapted
from tightfit.errors import UnsupportedError


class Entrance(Absent):
    """Stands for the layer before a stage's first one: what was received comes out of it.

    Attributes:
        received: hidden states, `[batch, seq, hidden]`, while a forward runs.
    """

    received: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """`received`, without what the model did to it on the way here."""
        assert self.received is not None
        return self.received


@dataclass(frozen=True)
class Chunk:
    """A run of layers.

    Attributes:
        modules: what the base model has in place of its own by name while the chunk computes: the
            list of layers with those of the chunk only, and nothing after them unless it is the
            last.
        entrance: None on the first of all.
        is_last: whether the output layer and the loss come after it.
    """

    modules: Mapping[str, nn.Module]
    entrance: Entrance | None
    is_last: bool


@dataclass
class Stage:
    """A model that is one stage.

    Attributes:
        number: of it, counted from 0.
        stages: how many there are.
        chunks: its runs of layers, in the order of the model.
        tied: whether the output layer is the embedding, of which the first and the last stage have
            a copy each.
        dtype: of what layers pass on: that of the base, which adapters are fp32 on.
    """

    model: PreTrainedModel
    number: int
    stages: int
    chunks: tuple[Chunk, ...]
    tied: bool
    dtype: torch.dtype
    _computing: Chunk | None = None

    @contextmanager
    def computing(self, chunk: Chunk, received: torch.Tensor | None) -> Iterator[None]:
        """Inside, a call of the model is one of this chunk.

        Args:
            received: hidden states, `[batch, seq, hidden]`; None for the first of all.
        """
        self._computing = chunk
        if chunk.entrance is not None:
            chunk.entrance.received = received
        try:
            yield
        finally:
            self._computing = None
            if chunk.entrance is not None:
                chunk.entrance.received = None

    def compute_in_chunks(self) -> None:
        """Have calls of the model be calls of one chunk. Whoever looks at the model finds all of
        them: layers are exchanged in its forward, not before it."""
        model, base = self.model, self.model.base_model
        whole = model.forward

        @functools.wraps(whole)
        def forward(*args: Any, **named: Any) -> Any:
            chunk = self._computing
            assert chunk is not None, "calls of a stage say of which chunk they are"
            with _exchanged(base, chunk.modules):
                if chunk.is_last:
                    return whole(*args, **named)
                inputs = {key: named.get(key) for key in ("input_ids", "inputs_embeds")}
                return base(**inputs, use_cache=False).last_hidden_state

        model.forward = forward

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer, and the loss."""
        return self.number == self.stages - 1

    @property
    def shared(self) -> nn.Parameter | None:
        """The trained parameter that two stages have, if this is one of the two."""
        if not self.tied or not (self.is_first or self.is_last):
            return None
        weight: Any = self.model.get_input_embeddings().weight
        assert isinstance(weight, nn.Parameter)
        return weight if weight.requires_grad else None

    @property
    def copies(self) -> frozenset[nn.Parameter]:
        """Those that an earlier stage has as well."""
        shared = None if self.is_first else self.shared
        return frozenset() if shared is None else frozenset([shared])

    def check_adapters(self) -> None:
        """See that no adapter is on what two stages have.

        Raises:
            UnsupportedError: one is.
        """
        if self.tied and is_adapted(self.model.get_input_embeddings()):
            raise UnsupportedError(
                "an adapter on an embedding that is the output layer too, which two pipeline "
                "stages have: leave it out of lora_target, or set pipeline_parallel_size 1"
            )


def apply_stage(
    model: PreTrainedModel, number: int, stages: int, chunks: int = 1, given: Sequence[int] = ()
) -> Stage:
    """Leave of `model` what stage `number` of several has.

    Args:
        model: a causal language model, whole; changed in place. It may be on the meta device.
        chunks: runs of layers that each stage has.
        given: how many layers each run has, if somebody says so.

    Raises:
        UnsupportedError: the model has no plan, or cannot be cut into so many.
    """
    runs = stage_runs(model, stages, chunks, given)
    base, layers = model.base_model, decoder_layers(model)
    before, name, after = _around(model, layers)
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    own = [_chunk(runs, index, layers, name, after) for index in range(number, len(runs), stages)]
    stage = Stage(model, number, stages, tuple(own), tied, model.dtype)
    kept = {index for run in runs[number::stages] for index in run}
    for index in range(len(layers)):
        if index not in kept:
            layers[index] = Absent()
    if not stage.is_first:
        _leave_out(base, [n for n in before if not (stage.is_last and _shares(base, n, head))])
    if not stage.is_last:
        _leave_out(base, after)
        model.set_output_embeddings(Absent())
    stage.compute_in_chunks()
    return stage


def stage_runs(
    model: PreTrainedModel, stages: int, chunks: int = 1, given: Sequence[int] = ()
) -> list[range]:
    """The numbers of the layers of each run, as `stage_layers` says; raises as `apply_stage`."""
    _check(model)
    base, layers = model.base_model, decoder_layers(model)
    before, _, after = _around(model, layers)
    return stage_layers(
        [_size(layer) for layer in layers],
        sum(_size(getattr(base, name)) for name in before),
        sum(_size(getattr(base, name)) for name in after) + _size(model.get_output_embeddings()),
        stages,
        chunks,
        given,
    )


def _chunk(
    runs: list[range], number: int, layers: nn.ModuleList, name: str, after: list[str]
) -> Chunk:
    """The chunk of one run of the layers, which `name` is the name of in the base model."""
    run, is_last = runs[number], number == len(runs) - 1
    own = [layers[index] if index in run else Absent() for index in range(len(layers))]
    entrance = Entrance() if number else None
    if entrance is not None:
        own[run.start - 1] = entrance
    absent = {} if is_last else {other: Absent() for other in after}
    return Chunk({name: nn.ModuleList(own), **absent}, entrance, is_last)


@contextmanager
def _exchanged(parent: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, `parent` has other modules by some names."""
    before = {name: getattr(parent, name) for name in modules}
    for name, module in modules.items():
        setattr(parent, name, module)
    try:
        yield
    finally:
        for name, module in before.items():
            setattr(parent, name, module)


def _check(model: PreTrainedModel) -> None:
    """See that the model says what it consists of.

    Raises:
        UnsupportedError: it has no plan, or adds to the loss what only some stages know.
    """
    config: Any = model.config.get_text_config()
    if not config.base_model_pp_plan:
        raise UnsupportedError(
            f"a {model.config.model_type} model has no pipeline plan in transformers; llama, "
            "qwen2, qwen3, mistral, gemma, phi3 and their like have one: set "
            "pipeline_parallel_size 1 and use zero_stage 3"
        )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedError(
            "output_router_logits in the model's config adds a loss over the routers of all "
            "layers, of which a pipeline stage has some: set it to false, or "
            "pipeline_parallel_size 1"
        )


def _around(model: PreTrainedModel, layers: nn.ModuleList) -> tuple[list[str], str, list[str]]:
    """What the base model has before its layers, these, and what it has after them, by name.

    Raises:
        UnsupportedError: it has parameters that its plan does not name.
    """
    base: Any = model.base_model
    names: list[str] = list(base.config.get_text_config().base_model_pp_plan)
    where = next(i for i, name in enumerate(names) if getattr(base, name) is layers)
    known = {p for name in names for p in getattr(base, name).parameters()}
    known.update(model.get_output_embeddings().parameters())
    unknown = next((name for name, p in model.named_parameters() if p not in known), None)
    if unknown is not None:
        raise UnsupportedError(
            f"{unknown} of this {model.config.model_type} model is not in its pipeline plan, so "
            "nobody knows which stage needs it: set pipeline_parallel_size 1 and use zero_stage 3"
        )
    return names[:where], names[where], names[where + 1 :]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(base: nn.Module, name: str, head: nn.Module) -> bool:
    """Whether a module of the base model is tied to the output layer, which then needs it to be
    known by the name that it has in files."""
    own = set(getattr(base, name).parameters())
    return any(parameter in own for parameter in head.parameters())


def _leave_out(base: nn.Module, names: list[str]) -> None:
    for name in names:
        setattr(base, name, Absent())
