"""The real engine on fake tensors: what a job will allocate, without allocating it.

A `FakeTensorMode` gives every tensor a shape and no storage; the ledger counts them as it counts
real ones. Runs at full depth, or on a few layers and a few more and then along a straight line:
every part of a step (a section) allocates a + b x layers at its highest moment, so each section is
extrapolated by itself and the highest is taken afterwards, wherever the peak moves. Where all
layers are of one type two and three are enough: middle layers lie on the line between the first
and the last and are never above both. Where types take turns, whole rounds of them are added.

Knows the engine and the facts, not how a plan is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers.masking_utils
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tightfit import ledger
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.errors import InputError, UnsupportedError
from tightfit.facts.workload import Workload
from tightfit.ledger import Kinds, Ledger, Section, table_of_sections
from tightfit.policies import Policies, Tier

SHALLOW = 2  # the first depth at which the first and the last layer differ
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Sections = dict[Section, dict[Tier, Kinds]]


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        table: the exact counts, without margin.
        trainable: number of parameters that get gradients.
        frozen: number of parameters that do not.
    """

    table: MemoryTable
    trainable: int
    frozen: int


def dry_run(
    config: PretrainedConfig, policies: Policies, workload: Workload, *, full_depth: bool = False
) -> DryRun:
    """The bill of one job on one rank, without margin.

    Args:
        config: of a causal language model of transformers.
        full_depth: run all layers instead of extrapolating from a few.

    Raises:
        UnsupportedError: the engine cannot apply a policy to this model.
    """
    depth = config.num_hidden_layers
    period = _period(_layer_patterns(config), depth)
    shallow = _shallow_depth(depth, period)
    if full_depth or depth <= shallow + period:
        sections, counts = _run(config, policies, workload)
        return DryRun(table_of_sections(sections), *counts)
    few, counts_few = _run(_with_depth(config, shallow), policies, workload)
    more, counts_more = _run(_with_depth(config, shallow + period), policies, workload)
    steps = (depth - shallow) // period
    sections = {
        section: {
            tier: _extrapolate(few[section][tier], more[section][tier], steps) for tier in Tier
        }
        for section in few
    }
    trainable, frozen = (_line(a, b, steps) for a, b in zip(counts_few, counts_more, strict=True))
    return DryRun(table_of_sections(sections), trainable, frozen)


def load_config(config: dict[str, Any]) -> PretrainedConfig:
    """A transformers config from the content of a config.json.

    Raises:
        InputError: transformers does not accept a value of it.
        UnsupportedError: transformers has no causal language model of this type.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type {model_type!r} is unknown to transformers {transformers.__version__}; "
            "install a newer one, or name another model (code from a model folder is never run)"
        )
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        loaded = AutoConfig.for_model(model_type, **fields)
    except (StrictDataclassError, ValueError) as error:
        raise InputError(f"config.json of a {model_type} model: {_one_line(error)}") from None
    if type(loaded) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(loaded, "num_hidden_layers"):
        raise UnsupportedError(
            f"model_type {model_type!r} is not that of a causal language model of text alone; "
            "name the text part of a model that has several"
        )
    return loaded


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _layer_patterns(config: PretrainedConfig) -> dict[str, list[Any]]:
    """The fields of a config that say something about each layer, such as `layer_types`."""
    depth = config.num_hidden_layers
    return {
        key: value
        for key, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == depth
    }


def _period(patterns: dict[str, list[Any]], depth: int) -> int:
    """After how many layers all patterns repeat: 1 where all layers are alike."""
    return next(
        period
        for period in range(1, depth + 1)
        if all(value[period:] == value[:-period] for value in patterns.values())
    )


def _shallow_depth(depth: int, period: int) -> int:
    """The smaller of the two depths to run: whole periods away from `depth`, and with a first, a
    last and, where types differ, all middle layers."""
    if period == 1:
        return SHALLOW
    shallow = depth % period + period
    return shallow if shallow >= period + SHALLOW else shallow + period


def _line(at_few: int, at_more: int, steps: int) -> int:
    return at_few + steps * (at_more - at_few)


def _extrapolate(few: Kinds, more: Kinds, steps: int) -> Kinds:
    kinds = {kind: _line(few.get(kind, 0), more.get(kind, 0), steps) for kind in Kind}
    return {kind: count for kind, count in kinds.items() if count}


def _with_depth(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    cut = {key: value[:layers] for key, value in _layer_patterns(config).items()}
    return load_config({**config.to_dict(), "num_hidden_layers": layers, **cut})


def _run(
    config: PretrainedConfig, policies: Policies, workload: Workload
) -> tuple[Sections, tuple[int, int]]:
    """One optimizer step, one evaluation and one generation on fake tensors."""
    if policies.adapter is not None:
        import_library()
    fakes = (FakeTensorMode(), _ReadsAreOne())  # type: ignore[no-untyped-call]
    with _no_packing_check(), _no_module_moves(), fakes[0], fakes[1]:
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[policies.precision.parameters]
        )
        layers = decoder_layers(model)
        with Ledger() as counting:
            counting.adopt(model)
            engine = fit(model, policies)
            _follow_layers(layers, counting)
            _train_step(engine, policies, workload)
            with ledger.phase(Phase.FORWARD):
                pass  # the next step begins with what this one has left
            _evaluate(engine, workload)
            _generate(engine, workload)
            # Saving writes tensors from where they are; nothing more lives than between steps.
            counting.set_section(Phase.SAVE)
        parameters = list(engine.model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    return counting.sections(), (trainable, frozen)


def _train_step(engine: Engine, policies: Policies, workload: Workload) -> None:
    """The second micro-batch already sees what accumulates, so two stand for any number."""
    for _ in range(min(policies.batch.accumulation_steps, 2)):
        input_ids, labels = fake_batch(policies.batch.micro_batch_size, workload.sequence_length)
        loss = engine.loss(input_ids, labels, workload.tokens_per_step)
        engine.backward(loss)
        del loss
    engine.step()


def _evaluate(engine: Engine, workload: Workload) -> None:
    if workload.evaluation_sequence_length:
        input_ids, labels = fake_batch(
            workload.evaluation_batch_size, workload.evaluation_sequence_length
        )
        engine.evaluation_loss(input_ids, labels)


@torch.no_grad()
def _generate(engine: Engine, workload: Workload) -> None:
    """The prompt, and the last token of the answer, when the cache is longest."""
    if not workload.prompt_length:
        return
    with ledger.phase(Phase.EVAL):
        engine.model.eval()
        _answer(engine, workload)
        engine.model.train()


def _answer(engine: Engine, workload: Workload) -> None:
    # What `generate` keeps beside the cache: tokens, mask, positions, and one of them as it grows.
    tokens, others = fake_batch(2, workload.prompt_length + workload.max_new_tokens)
    prompt = tokens[:1, : workload.prompt_length]
    cache = engine.model(input_ids=prompt, use_cache=True, logits_to_keep=1).cache
    if workload.max_new_tokens > 1:
        _lengthen(cache, workload.max_new_tokens - 2)
        engine.model(input_ids=tokens[:1, :1], cache=cache, use_cache=True)
    del others


def _lengthen(cache: Cache, tokens: int) -> None:
    """Put so many tokens into a cache, as if they had been generated one by one."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayerMixin) and layer.keys is not None:
            assert layer.values is not None
            keys, values = (
                old.new_zeros(*old.shape[:-2], tokens, old.shape[-1])
                for old in (layer.keys, layer.values)
            )
            cache.update(keys, values, index)


def fake_batch(batch_size: int, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels `[batch, seq]`, booked as the training loop books them."""
    with ledger.labelled(Kind.BUFFERS):
        shape = (batch_size, sequence_length)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's repeated layers."""
    depth = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")


def _follow_layers(layers: nn.ModuleList, counting: Ledger) -> None:
    """Open a section of the ledger at each layer, in forward and in backward."""
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        name = "first layer" if index == 0 else "last layer" if index == last else "middle layers"
        layer.register_forward_pre_hook(_enter(counting, name))
        layer.register_forward_hook(_leave(counting, name, is_last=index == last))


def _enter(counting: Ledger, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        phase = counting.section[0]
        counting.set_section(phase, name)
        if phase is Phase.FORWARD and name == "first layer" and inputs:
            _when_gradient_arrives(inputs[0], counting, "embedding")

    return hook


def _leave(counting: Ledger, name: str, *, is_last: bool) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        phase = counting.section[0]
        if phase is Phase.BACKWARD:  # a checkpointed layer that is being recomputed
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if phase is Phase.FORWARD:
            _when_gradient_arrives(hidden, counting, name)
        if is_last:
            counting.set_section(phase, "head")

    return hook


def _when_gradient_arrives(tensor: torch.Tensor, counting: Ledger, name: str) -> None:
    def hook(gradient: torch.Tensor) -> None:
        counting.set_section(Phase.BACKWARD, name)

    if tensor.requires_grad:
        tensor.register_hook(hook)


class _ReadsAreOne(TorchDispatchMode):
    """Where a program reads a value of a fake tensor it gets one: finite, true, positive."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `Ledger`."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer `item()` and `bool()`; leave everything else to the fake mode below."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_packing_check() -> Iterator[None]:
    """Transformers looks at position ids to find packed samples; fake ones cannot be looked at.

    tightfit's batches are not packed, for which the real check answers None as well.
    """
    original = transformers.masking_utils.find_packed_sequence_indices
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        transformers.masking_utils.find_packed_sequence_indices = original


@contextmanager
def _no_module_moves() -> Iterator[None]:
    """`Module.to` swaps parameters, which fake ones refuse; here all are where they belong."""
    original = nn.Module.to
    nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]
