"""Saved tensors that leave the device and come back change no bit, and leave it empty meanwhile.

Copies arrive as late as they may and are poison until then (`PostponedTransfer`), so a missing wait
is NaN; a card would also overwrite memory that is let go of too early, which `Guarded` looks for.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.postponed import PostponedTransfer
from tests.taken import chequered, every
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.pinned import pinned_host
from tightfit.engine import activations as module
from tightfit.engine.activations import ActivationOffload
from tightfit.engine.adapter import apply_adapter
from tightfit.engine.adapter import import_library as import_peft
from tightfit.engine.attention import apply_attention
from tightfit.engine.buffers import HostBuffers
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.layers import decoder_layers
from tightfit.engine.loss import apply_loss
from tightfit.engine.quantisation import apply_quantisation
from tightfit.engine.saved import Span, Travelling
from tightfit.engine.slab import HostSlab
from tightfit.engine.streaming import ParameterStream
from tightfit.engine.transfer import Arrival, Transfer
from tightfit.engine.units import Unit, units_of
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    QuantisationPolicy,
    Tier,
)

CPU = torch.device("cpu")
VOCABULARY, DEPTH = 61, 5
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **TOKENS,
}
MODELS: dict[str, Callable[[int], PretrainedConfig]] = {
    "llama": lambda depth: LlamaConfig(**SIZES, num_hidden_layers=depth),
    "qwen2": lambda depth: Qwen2Config(
        **SIZES, num_hidden_layers=depth, tie_word_embeddings=True, attention_dropout=0.1
    ),
    "gpt2": lambda depth: GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=depth, n_head=2, n_positions=32, **TOKENS
    ),  # with dropout
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpointing": CheckpointingPolicy(True)},
    "selective": {"checkpointing": CheckpointingPolicy(True, every=2)},
    "chunk": {"loss": LossPolicy(LossKind.CHUNKED, 5)},
    "eager": {"attention": AttentionPolicy(AttentionKernel.EAGER)},
    "lora": {"adapter": AdapterPolicy(rank=2, dropout=0.1)},
    "qlora": {"adapter": AdapterPolicy(rank=2), "quantisation": QuantisationPolicy()},
}
Results = tuple[list[float], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small."""
    monkeypatch.setattr(module, "SMALLEST_LEAVING_BYTES", 1)


def policies_of(case: str) -> Policies:
    chosen = [TECHNIQUES[word] for word in case.split()]
    return Policies(**{key: value for technique in chosen for key, value in technique.items()})


def make_model(name: str = "llama", case: str = "", depth: int = DEPTH) -> nn.Module:
    """With techniques applied, as `fit` does it."""
    torch.manual_seed(0)
    policies = policies_of(case)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(MODELS[name](depth))
    apply_quantisation(model, policies.quantisation)
    adapted = apply_adapter(model, policies.adapter)
    apply_attention(model, policies.attention)
    apply_loss(model, policies.loss)
    apply_checkpointing(model, policies.checkpointing)
    return adapted.train()


def base_of(root: nn.Module) -> PreTrainedModel:
    """Without peft's wrapping."""
    return root if isinstance(root, PreTrainedModel) else root.get_base_model()  # type: ignore[operator, no-any-return]


def offload(
    root: nn.Module,
    transfer: Transfer | None = None,
    *,
    prefetch: int = 1,
    gathered: bool = False,
) -> ActivationOffload:
    units = units_of(root, base_of(root), gathered=gathered)
    placement = PlacementPolicy(activations=Tier.HOST, prefetch=prefetch)
    offloading = ActivationOffload(root, units, placement, transfer or PostponedTransfer(CPU))
    for unit in units:
        unit.watch()
    return offloading


def batch(seed: int, size: int = 2, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (size, length), generator=generator)


def loss_of(root: nn.Module, seed: int = 0, length: int = 12) -> torch.Tensor:
    ids = batch(seed, length=length)
    torch.manual_seed(seed)  # of dropout
    loss: torch.Tensor = root(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def outputs_of(*modules: nn.Module) -> list[torch.Tensor]:
    """Gets what each of them returns from now on."""
    outputs: list[torch.Tensor] = []
    for watched in modules:
        watched.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    return outputs


def gradients(root: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in root.parameters() if p.grad is not None]


def train(root: nn.Module) -> Results:
    """Two steps of two micro-batches."""
    losses = []
    for step in range(2):
        for piece in range(2):
            loss = loss_of(root, 2 * step + piece)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        found = gradients(root)
        with torch.no_grad():
            for parameter in root.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return losses, found


@functools.cache
def plainly(name: str = "llama", case: str = "") -> Results:
    """What a model gives whose activations stay where they are."""
    return train(make_model(name, case))


def assert_same_bits(found: Results, expected: Results) -> None:
    assert found[0] == expected[0]
    assert_same_gradients(found[1], expected[1])


def assert_same_gradients(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Numbers


@pytest.mark.parametrize(("name", "prefetch"), chequered(MODELS, [0, 1, 2, 9]))
def test_same_bits_for_every_model(name: str, prefetch: int) -> None:
    root = make_model(name)
    offloading = offload(root, prefetch=prefetch)
    assert_same_bits(train(root), plainly(name))
    assert offloading.buffers.held_bytes or prefetch > DEPTH
    assert offloading.buffers.lent_bytes == 0


@pytest.mark.parametrize(
    ("name", "case"),
    every(
        2,
        [
            ("llama", "checkpoint"),
            ("gpt2", "checkpoint"),
            ("qwen2", "selective chunk"),
            ("llama", "selective"),
            ("gpt2", "eager checkpoint"),
            ("llama", "eager"),
            ("qwen2", "lora checkpoint chunk"),
            ("llama", "lora"),
            ("llama", "qlora checkpoint"),
            ("llama", "qlora"),
            ("qwen2", "chunk"),
        ],
    ),
)
def test_same_bits_with_every_technique(name: str, case: str) -> None:
    root = make_model(name, case)
    offloading = offload(root)
    assert_same_bits(train(root), plainly(name, case))
    assert offloading.buffers.held_bytes
    assert offloading.buffers.lent_bytes == 0


@pytest.mark.parametrize(
    ("case", "resharding"), chequered(["", "checkpoint", "lora"], [True, False])
)
def test_what_ranks_share_stays_with_them(tmp_path: Path, case: str, resharding: bool) -> None:
    """Whole parameters come and go with FSDP2, whose memory autograd's tensors are views of."""
    expected = plainly(case=case)
    alone = make_model(case=case)
    host_bytes = offload(alone, gathered=True).buffers
    train(alone)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        root = make_model(case=case)
        for shard in (*decoder_layers(base_of(root)), root):
            fully_shard(shard, reshard_after_forward=resharding)
        buffers = offload(root, gathered=True).buffers
        losses, found = train(root)
        assert losses == expected[0]
        assert_same_gradients([g.full_tensor() for g in found], expected[1])  # type: ignore[attr-defined]
        assert buffers.held_bytes == host_bytes.held_bytes
        assert buffers.lent_bytes == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "case"), [("llama", ""), ("qwen2", "lora checkpoint chunk"), ("llama", "qlora")]
)
def test_parameters_that_stream_stay_with_their_stream(name: str, case: str) -> None:
    """Their memory comes and goes while autograd holds views of it."""
    root = make_model(name, case)
    alone = offload(root).buffers
    expected = train(root)
    root = make_model(name, case)
    units = units_of(root, base_of(root), gathered=False)
    placement = PlacementPolicy(activations=Tier.HOST, parameters=Tier.HOST)
    transfer, slab = PostponedTransfer(CPU), HostSlab(CPU)
    stream = ParameterStream(units, placement, transfer, slab)
    slab.allocate()
    stream.adopt()
    buffers = ActivationOffload(root, units, placement, transfer).buffers
    for unit in units:
        unit.before_use.append(functools.partial(stream.use, unit))
        unit.watch()
    losses = []
    for seed in range(2):
        loss = loss_of(root, seed)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    assert losses == expected[0][:2]
    plain = make_model(name, case)
    for seed in range(2):
        loss_of(plain, seed).backward()  # type: ignore[no-untyped-call]
    assert_same_gradients(gradients(root), gradients(plain))
    assert buffers.held_bytes == alone.held_bytes


def test_a_second_backward_fetches_again() -> None:
    plain = make_model()
    loss_of(plain).backward()  # type: ignore[no-untyped-call]
    once = gradients(plain)
    root = make_model()
    buffers = offload(root).buffers
    loss = loss_of(root)
    for _ in range(3):
        root.zero_grad()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert_same_gradients(gradients(root), once)
        assert buffers.lent_bytes
    del loss
    assert buffers.lent_bytes == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(order: tuple[int, ...]) -> None:
    results = []
    for root in (make_model("gpt2"), offloaded := make_model("gpt2")):
        buffers = offload(root).buffers if root is offloaded else None
        for _ in range(2):
            losses = [loss_of(root, seed) for seed in range(3)]
            for index in order:
                losses[index].backward()  # type: ignore[no-untyped-call]
            del losses
        results.append(gradients(root))
    assert_same_gradients(results[1], results[0])
    assert buffers is not None
    assert buffers.lent_bytes == 0


def test_gradients_of_a_part_of_the_graph() -> None:
    """Backward asks for the tensors of some layers only, and from the middle."""
    found = []
    for root in (make_model(), offloaded := make_model()):
        if root is offloaded:
            offload(root)
        layers = decoder_layers(base_of(root))
        hidden = outputs_of(*layers)
        loss_of(root)
        weights = [layers[0].mlp.up_proj.weight, layers[2].mlp.up_proj.weight]
        found.append(list(torch.autograd.grad(hidden[2].square().sum(), weights)))
        hidden.clear()
    assert_same_gradients(found[1], found[0])


class Blocks(nn.Module):
    """Layers that are called in any order, any number of times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(5)
        )

    def forward(self, hidden: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            hidden = hidden + self.layers[index](hidden)
        return hidden.square().sum()


def offload_blocks(root: Blocks, transfer: Transfer) -> ActivationOffload:
    units = [
        Unit(str(index), (layer,), tuple(layer.parameters()), is_layer=True)
        for index, layer in enumerate(root.layers)
    ]
    placement = PlacementPolicy(activations=Tier.HOST)
    offloading = ActivationOffload(root, units, placement, transfer)
    for unit in units:
        unit.watch()
    return offloading


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 2, 3, 4),
        (0, 1, 1, 1, 2, 3, 4),
        (0, 1, 2, 3, 4, 1, 0),
        (0, 2, 4),
        (0, 1, 2),
        (4, 3, 2, 1, 0),
        (4,),
        (0,),
    ],
)
def test_layers_in_any_order_and_number(order: tuple[int, ...]) -> None:
    found = []
    for root in (Blocks(), offloaded := Blocks()):
        if root is offloaded:
            buffers = offload_blocks(root, PostponedTransfer(CPU)).buffers
        for way in ((0, 1, 2, 3, 4), order, (0, 1, 2, 3, 4)):
            root(torch.ones(3, 8), way).backward()
        found.append(gradients(root))
    assert_same_gradients(found[1], found[0])
    assert buffers.lent_bytes == 0


# Races


@pytest.mark.parametrize("race", ["fetched", "copied again"])
def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch, race: str) -> None:
    """These tests could fail."""
    expected = plainly()
    root = make_model()
    offload(root)
    if race == "fetched":
        monkeypatch.setattr(Travelling, "flat", _flat_at_once)
        found = train(root)[1]
        assert any(gradient.isnan().any() for gradient in found)
        assert not any(torch.equal(a, b) for a, b in zip(found[1:9], expected[1][1:9], strict=True))
    else:
        monkeypatch.setattr(Travelling, "let_go", _let_go_at_once)
        with pytest.raises(AssertionError, match="copies what has not arrived"):
            train(root)


def _flat_at_once(travelling: Travelling) -> torch.Tensor:
    assert travelling._here is not None
    return travelling._here[0]


def _let_go_at_once(travelling: Travelling) -> None:
    travelling._here = None


class Guarded(Transfer):
    """Knows whose memory ended before the stream was ordered behind a copy of it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.too_early: list[str] = []
        self.copies = 0

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, ordered: bool = True
    ) -> Arrival:
        super().copy(destination, source, ordered=ordered)
        arrival = _Guard(self.too_early)
        self.copies += 1
        for name, tensor in (("destination", destination), ("source", source)):
            weakref.finalize(tensor.untyped_storage(), arrival.ended, name)
        return arrival


class _Guard:
    def __init__(self, too_early: list[str]) -> None:
        self._too_early = too_early
        self._is_ordered = False

    def ended(self, name: str) -> None:
        if not self._is_ordered:
            self._too_early.append(name)

    def wait(self) -> None:
        self._is_ordered = True

    order = wait


def unusual_runs(root: nn.Module) -> None:
    """Graphs that are used twice, in part, or not at all."""
    train(root)
    loss = loss_of(root)
    del loss
    loss = loss_of(root)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss_of(root, 1).backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    with failing(root, layer=2, backward=True), pytest.raises(ValueError, match="as planned"):
        loss_of(root).backward()  # type: ignore[no-untyped-call]
    gc.collect()


@pytest.mark.parametrize(("case", "prefetch"), chequered(["", "checkpoint"], range(3)))
def test_memory_is_held_until_copies_are_ordered(case: str, prefetch: int) -> None:
    transfer = Guarded()
    root = make_model(case=case)
    offload(root, transfer, prefetch=prefetch)
    unusual_runs(root)
    assert transfer.copies
    assert transfer.too_early == []


def test_memory_that_ends_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Guarded()
    root = make_model()
    offload(root, transfer)
    monkeypatch.setattr(Travelling, "let_go", _let_go_at_once)
    unusual_runs(root)
    assert {"source", "destination"} <= set(transfer.too_early)


# Errors


@contextmanager
def failing(
    root: nn.Module, *, layer: int, backward: bool, error: Any = ValueError
) -> Iterator[None]:
    """A forward, or its backward, that ends with an error in the middle."""

    def fail(gradient: torch.Tensor) -> None:
        raise error("as planned")

    def leave(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if not backward:
            raise error("as planned")
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    handle = decoder_layers(base_of(root))[layer].register_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("backward", "error"),
    chequered([False, True], [ValueError, KeyboardInterrupt, torch.OutOfMemoryError]),
)
def test_after_an_error_everything_is_as_before(backward: bool, error: type[BaseException]) -> None:
    expected = plainly()
    root = make_model()
    buffers = offload(root).buffers
    with failing(root, layer=2, backward=backward, error=error):
        try:
            loss_of(root).backward()  # type: ignore[no-untyped-call]
        except error:
            pass
        else:
            pytest.fail("no error")
    gc.collect()
    assert buffers.lent_bytes == 0
    outside = nn.Linear(4, 4)(torch.ones(2, 4)).sum()
    outside.backward()
    assert buffers.lent_bytes == 0, "nothing outside of the model travels"
    root.zero_grad()
    assert_same_bits(train(root), expected)


@pytest.mark.parametrize("layer", [0, DEPTH - 1], ids=["travels", "stays"])
def test_a_change_in_place_is_an_error_as_ever(layer: int) -> None:
    messages = []
    for root in (make_model(), offloaded := make_model()):
        if root is offloaded:
            offload(root)
        mlp = decoder_layers(base_of(root))[layer].mlp
        changed = outputs_of(mlp.up_proj)
        loss = loss_of(root)
        changed[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()  # type: ignore[no-untyped-call]
        messages.append(str(caught.value).split("; expected version ")[1].split()[0])
    assert messages[0].rstrip(";") == messages[1]


def test_two_versions_of_one_storage_are_two_tensors() -> None:
    class Changing(Blocks):
        def forward(self, hidden: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            weight = self.layers[0][0].weight
            factor = torch.full((8, 8), 2.0)
            self.unused = weight * factor  # whose backward would be an error
            factor += 1
            return (weight * factor).sum() + super().forward(hidden, order)

    root = Changing()
    buffers = offload_blocks(root, Transfer(CPU)).buffers
    root(torch.ones(3, 8), (1, 2, 3, 4)).backward()
    assert buffers.lent_bytes
    assert root.layers[0][0].weight.grad.eq(3).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        root.unused.sum().backward()


# Bytes


def measured(
    root: nn.Module, *, prefetch: int | None = 1, gathered: bool = False, steps: int = 3
) -> Ledger:
    """Micro-batches, each a chapter, and no gradients in between."""
    counting = Ledger()
    with counting:
        counting.adopt(root)
        if prefetch is not None:
            offload(root, Transfer(CPU), prefetch=prefetch, gathered=gathered)
        for step in range(steps):
            counting.chapter = str(step)
            counting.set_section(Phase.FORWARD)
            loss = loss_of(root)
            counting.set_section(Phase.BACKWARD)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            root.zero_grad()
    return counting


def activations(counting: Ledger, tier: Tier, chapter: int = 1) -> list[int]:
    """Their bytes at the peaks of forward and backward."""
    return [
        counting.sections()[phase, str(chapter)][tier].get(Kind.ACTIVATIONS, 0)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]


@pytest.mark.parametrize(
    ("model", "prefetch"),
    chequered(
        [("llama", ""), ("llama", "checkpoint"), ("qwen2", "eager"), ("qwen2", "chunk")], range(3)
    ),
    ids=str,
)
def test_the_device_holds_a_few_layers_and_the_host_the_others(
    model: tuple[str, str], prefetch: int
) -> None:
    """As much as a plain model of so few layers; each layer more is on the host."""
    name, case = model
    few, more = (
        activations(measured(make_model(name, case, depth), prefetch=None), Tier.DEVICE)
        for depth in (1 + prefetch, 8)
    )
    counting = measured(make_model(name, case, 8), prefetch=prefetch)
    device = activations(counting, Tier.DEVICE)
    assert device[0] == few[0]
    assert device[1] <= few[1]
    host = activations(counting, Tier.HOST)
    angles = 0 if case == "checkpoint" else host[0] - (more[0] - few[0])
    assert host == [more[0] - few[0] + angles] * 2
    assert angles in (0, 2 * 4 * 12 * 4), "cosines and sines [tokens, head]"


def test_every_micro_batch_takes_as_much_as_the_first() -> None:
    """Which is all that a dry run sees."""
    for case in ("", "selective"):
        counting = measured(make_model(case=case))
        for tier in (Tier.DEVICE, Tier.HOST):
            first = activations(counting, tier, 0)
            assert activations(counting, tier, 1) == activations(counting, tier, 2) == first
        assert counting.kinds(Tier.HOST)[Kind.ACTIVATIONS] == first[0] == first[1], "it stays"


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_layers_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch, prefetch: int) -> None:
    """When backward comes to a layer, the first `prefetch` to come are on their way."""
    fetched: list[Travelling] = []
    plain_fetch = Travelling.fetch
    monkeypatch.setattr(
        Travelling, "fetch", lambda one: plain_fetch(one) and not fetched.append(one)
    )
    root = make_model()
    offload(root, prefetch=prefetch)
    so_far: list[int] = []

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: so_far.append(len(fetched)))  # type: ignore[no-untyped-call]

    for layer in decoder_layers(base_of(root)):
        layer.register_forward_hook(note)
    loss_of(root).backward()  # type: ignore[no-untyped-call]
    left = DEPTH - 1 - prefetch
    per_layer = len(fetched) // left
    assert len(fetched) == left * per_layer > 0
    # Of those after the layer that backward has come to, and as many ahead of the one just done.
    expected = [min(max(n - 1, 0), left) for n in range(DEPTH)]
    assert so_far == [count * per_layer for count in expected]


def test_what_two_layers_save_goes_with_the_later_one_and_comes_back_with_it() -> None:
    transfer = Transfer(CPU)
    buffers = HostBuffers(transfer, Kind.ACTIVATIONS)
    earlier = Span((), stays=False, before=None)
    later = Span((), stays=False, before=earlier)
    both = Travelling(torch.ones(3), buffers, transfer)
    for span in (earlier, later, later):
        span.add(both)
    assert [list(span.travelling()) for span in (earlier, later)] == [[both], [both]]
    earlier.let_go()
    assert not both.fetch(), "it is still here"
    later.let_go()
    assert both.fetch()
    assert both.flat().tolist() == [1, 1, 1]


def test_what_a_kept_graph_has_fetched_goes_when_another_begins() -> None:
    root = make_model()
    offload(root, Transfer(CPU))
    with Ledger() as counting:
        counting.adopt(root)
        counting.set_section(Phase.FORWARD)
        loss = loss_of(root)
        held = counting.kinds(Tier.DEVICE)[Kind.ACTIVATIONS]
        counting.set_section(Phase.BACKWARD)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert counting.kinds(Tier.DEVICE)[Kind.ACTIVATIONS] > held
        counting.set_section(Phase.FORWARD)
        other = loss_of(root, 1)
        del other
        assert counting.kinds(Tier.DEVICE)[Kind.ACTIVATIONS] == held
        counting.set_section(Phase.BACKWARD)
        for _ in range(2):
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        peak = counting.sections()[Phase.BACKWARD, ""][Tier.DEVICE][Kind.ACTIVATIONS]
        assert counting.kinds(Tier.DEVICE)[Kind.ACTIVATIONS] <= peak


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_model()
    held = [offload(root).buffers]
    loss_of(root)
    small = 2 * 12 * 4  # one number for each token
    monkeypatch.setattr(module, "SMALLEST_LEAVING_BYTES", small + 1)
    root = make_model()
    held.append(offload(root).buffers)
    loss_of(root)
    layers = DEPTH - 2
    norms = 2 * layers  # each of which saves one number for each token
    assert held[0].held_bytes - held[1].held_bytes == norms * small


@pytest.mark.parametrize(
    ("name", "case", "gathered"),
    [
        ("llama", "lora checkpoint", True),
        ("qwen2", "selective chunk", False),
        ("gpt2", "eager", True),
    ],
)
def test_a_dry_run_sees_the_same_bytes(name: str, case: str, gathered: bool) -> None:
    if "lora" in case:
        import_peft()

    def sections() -> Any:
        root = make_model(name, case, depth=3)
        return measured(root, gathered=gathered, steps=2).sections()

    real = sections()
    with fake_tensors():
        fake = sections()
        with pinned_host():
            card = sections()
    assert fake == real
    section = (Phase.BACKWARD, "1")
    assert card[section][Tier.PINNED] == real[section][Tier.HOST]
    assert card[section][Tier.HOST] == {}
    assert card[section][Tier.PINNED][Kind.ACTIVATIONS]


def test_shorter_batches_take_nothing_more_and_a_longer_one_once() -> None:
    root = make_model()
    buffers = offload(root).buffers
    held = []
    for length in (12, 12, 7, 3, 12, 16, 16, 16):
        loss_of(root, length=length).backward()  # type: ignore[no-untyped-call]
        held.append(buffers.held_bytes)
    fresh = make_model()
    longest = offload(fresh).buffers
    loss_of(fresh, length=16).backward()  # type: ignore[no-untyped-call]
    assert held[:5] == [held[0]] * 5
    assert held[6:] == [longest.held_bytes] * 2
    assert held[5] > held[6], "pageable ones beside those of shorter batches, until it is over"


def test_nothing_travels_without_gradients_or_outside_of_training() -> None:
    root = make_model()
    buffers = offload(root).buffers
    with torch.no_grad():
        loss_of(root)
    root.eval()
    loss_of(root).backward()  # type: ignore[no-untyped-call]
    assert buffers.held_bytes == 0
    root.train()
    loss_of(root)
    assert buffers.held_bytes > 0


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_out_of_memory_in_the_middle_leaves_nothing_behind(tier: Tier) -> None:
    root = make_model()
    with Ledger() as counting:
        counting.adopt(root)
        buffers = offload(root).buffers
        loss = loss_of(root)
        counting.limits[tier] = counting.total_bytes(tier) if tier is Tier.DEVICE else 1000
        with pytest.raises(torch.OutOfMemoryError):
            (loss if tier is Tier.DEVICE else loss_of(root, length=20)).backward()  # type: ignore[no-untyped-call]
        counting.limits.clear()
        del loss
        gc.collect()
        assert buffers.lent_bytes == 0
        root.zero_grad()
    assert_same_bits(train(root), plainly())
