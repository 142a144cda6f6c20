"""Parameters that come and go change no number, and never are more than they should be at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.postponed import PostponedTransfer
from tests.taken import chequered
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM, PreTrainedModel

from tightfit.bill.table import Kind
from tightfit.dry_run.fakes import fake_tensors
from tightfit.engine.adapter import apply_adapter
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.loss import apply_loss
from tightfit.engine.quantisation import apply_quantisation
from tightfit.engine.residency import Visitors
from tightfit.engine.slab import HostSlab
from tightfit.engine.streaming import ParameterStream
from tightfit.engine.transfer import Transfer
from tightfit.engine.units import Unit, units_of
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    QuantisationPolicy,
    Tier,
)

CPU = torch.device("cpu")
PROGRAM = Path(__file__).with_name("streamed_runs.py")
Make = Callable[..., LlamaForCausalLM]
MakeBatch = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Results = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


@dataclass
class Trained:
    """A model made ready; `stream` is None where it is resident."""

    model: PreTrainedModel
    root: nn.Module
    units: list[Unit]
    stream: ParameterStream | None
    transfer: Transfer


def prepare(
    model: PreTrainedModel,
    placement: PlacementPolicy | None,
    *,
    transfer: Transfer | None = None,
    adapter: bool = False,
    bits4: bool = False,
    checkpointing: CheckpointingPolicy | None = None,
    chunked: bool = False,
) -> Trained:
    """What `fit` does, with nothing but parameters placed; resident where there is no placement."""
    apply_quantisation(model, QuantisationPolicy() if bits4 else None)
    torch.manual_seed(1)
    root = apply_adapter(model, AdapterPolicy(rank=2) if adapter or bits4 else None)
    for name, parameter in root.named_parameters():
        if "lora_B" in name:  # zero otherwise, and with it many gradients
            nn.init.normal_(parameter, std=0.1)
    apply_loss(model, LossPolicy(LossKind.CHUNKED if chunked else LossKind.FULL, 5))
    apply_checkpointing(model, checkpointing or CheckpointingPolicy())
    root.train()
    transfer = transfer or PostponedTransfer(CPU)
    units = units_of(root, model, gathered=False)
    if placement is None:
        return Trained(model, root, units, None, transfer)
    slab = HostSlab(CPU)
    stream = ParameterStream(units, placement, transfer, slab)
    slab.allocate()
    stream.adopt()
    for unit in units:
        unit.before_use.append(lambda unit=unit: stream.use(unit))  # type: ignore[misc]
        unit.watch()
    return Trained(model, root, units, stream, transfer)


def loss_of(trained: Trained, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = trained.root(input_ids=batch[0], labels=batch[1], use_cache=False).loss
    return loss


def gradients_of(trained: Trained) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in trained.root.named_parameters() if p.grad is not None}


def assert_same(first: Results, second: Results) -> None:
    for a, b in zip(first[0], second[0], strict=True):
        assert torch.isfinite(a)
        assert torch.equal(a, b)
    assert first[1].keys() == second[1].keys()
    assert first[1]
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name]), name


def host(fraction: float = 1.0, prefetch: int = 1) -> PlacementPolicy:
    return PlacementPolicy(parameters=Tier.HOST, parameter_fraction=fraction, prefetch=prefetch)


def two_micro_batches(trained: Trained, make_batch: MakeBatch) -> Results:
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)  # dropout draws the same
        loss = loss_of(trained, make_batch(seed))
        losses.append(loss.detach())
        loss.backward()
    return losses, gradients_of(trained)


TIES = ("tied", "untied")
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": CheckpointingPolicy(True)},
    "every second": {"checkpointing": CheckpointingPolicy(True, 2)},
    "chunked": {"chunked": True},
    "lora": {"adapter": True},
    "lora checkpointing": {"adapter": True, "checkpointing": CheckpointingPolicy(True)},
    "4 bits": {"bits4": True},
    "4 bits chunked": {"bits4": True, "chunked": True, "checkpointing": CheckpointingPolicy(True)},
}


@pytest.mark.parametrize(("technique", "tie"), chequered(TECHNIQUES, TIES))
def test_losses_and_gradients_are_those_of_a_resident_model(
    make_model: Make, make_batch: MakeBatch, technique: str, tie: str
) -> None:
    """Also where only half of the layers stream."""
    results = []
    for placement in (None, host(prefetch=1), host(0.5, 2)):
        model = make_model(num_hidden_layers=3, tie_word_embeddings=tie == "tied")
        trained = prepare(model, placement, **TECHNIQUES[technique])
        results.append(two_micro_batches(trained, make_batch))
    resident, *streamed = results
    for found in streamed:
        assert_same(resident, found)


def test_prefetching_changes_no_number(make_model: Make, make_batch: MakeBatch) -> None:
    results = []
    for chosen in (None, *(host(prefetch=prefetch) for prefetch in (0, 1, 2, 9))):
        model = make_model(torch.bfloat16, num_hidden_layers=4)
        results.append(two_micro_batches(prepare(model, chosen), make_batch))
    resident, *streamed = results
    for found in streamed:
        assert_same(resident, found)


def test_a_model_with_several_embeddings(make_batch: MakeBatch) -> None:
    """GPT-2: of tokens, tied, and of positions; its linear layers' weights are transposed."""
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 4}
    results = []
    for chosen in (None, host()):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=1))
        results.append(two_micro_batches(prepare(model, chosen), make_batch))
    assert_same(*results)


# What a step may be made of, beside one forward and one backward


def two_backward_calls(trained: Trained, make_batch: MakeBatch) -> Results:
    """Of one forward, then of two forwards in their order."""
    loss = loss_of(trained, make_batch(0))
    loss.backward(retain_graph=not chunked(trained))  # which keeps its gradients for one call
    if not chunked(trained):
        loss.backward()
    first, second = loss_of(trained, make_batch(1)), loss_of(trained, make_batch(2))
    first.backward()
    second.backward()
    return [loss.detach(), first.detach(), second.detach()], gradients_of(trained)


def chunked(trained: Trained) -> bool:
    return "forward" in vars(trained.model)


def evaluation_between(trained: Trained, make_batch: MakeBatch) -> Results:
    """An evaluation before, between forward and backward, and an answer afterwards."""
    losses = []
    with torch.no_grad():
        losses.append(loss_of(trained, make_batch(3)))
    loss = loss_of(trained, make_batch(0))
    with torch.inference_mode():
        losses.append(loss_of(trained, make_batch(4)).clone())
    loss.backward()
    trained.root.eval()
    ids = make_batch(5)[0][:1, :4]
    answer = trained.root.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
    )
    return [loss.detach(), *losses, answer.sum()], gradients_of(trained)


def layer_used_twice(trained: Trained, make_batch: MakeBatch) -> Results:
    """The first layer comes again after the second, and then at once again."""
    with layers(trained, [0, 1, 0, 0, 2]):
        return two_micro_batches(trained, make_batch)


def layer_skipped(trained: Trained, make_batch: MakeBatch) -> Results:
    """In a step between two others."""
    before = loss_of(trained, make_batch(0))
    before.backward()
    with layers(trained, [0, 2]):
        results = two_micro_batches(trained, make_batch)
    after = loss_of(trained, make_batch(0))
    after.backward()
    return [before.detach(), *results[0], after.detach()], gradients_of(trained)


def released_between(trained: Trained, make_batch: MakeBatch) -> Results:
    losses = []
    for seed in range(2):
        loss = loss_of(trained, make_batch(seed))
        if trained.stream is not None:
            trained.stream.release()
        loss.backward()
        if trained.stream is not None:
            trained.stream.release()
        losses.append(loss.detach())
    return losses, gradients_of(trained)


def part_of_the_graph(trained: Trained, make_batch: MakeBatch) -> Results:
    """The gradient of what layers have made, without the rest, and of an input's embedding."""
    ids, _ = make_batch(0)
    hidden = trained.model.model(ids, use_cache=False).last_hidden_state
    hidden.square().sum().backward()
    embedded = trained.model.get_input_embeddings()(ids).detach().requires_grad_()
    output = trained.model(inputs_embeds=embedded, use_cache=False).logits.square().sum()
    (gradient,) = torch.autograd.grad(output, embedded)
    return [hidden.sum().detach(), output.detach(), gradient.sum()], gradients_of(trained)


def same_tensor_for_two(trained: Trained, make_batch: MakeBatch) -> Results:
    """The output layer gets the last norm's output itself, and with a chunked loss returns it."""
    made: list[torch.Tensor] = []
    trained.model.model.norm.register_forward_hook(lambda *call: made.append(call[-1]))
    trained.model.lm_head.register_forward_pre_hook(lambda *call: (made.pop(),))
    return two_micro_batches(trained, make_batch)


@contextmanager
def layers(trained: Trained, order: Iterable[int]) -> Iterator[None]:
    """The decoder has these of its layers, in this order, inside."""
    decoder: Any = trained.model.model
    plain = decoder.layers
    decoder.layers = nn.ModuleList(plain[index] for index in order)
    decoder.config.num_hidden_layers = len(decoder.layers)
    try:
        yield
    finally:
        decoder.layers = plain
        decoder.config.num_hidden_layers = len(plain)


STEPS = [
    two_backward_calls,
    evaluation_between,
    layer_used_twice,
    layer_skipped,
    released_between,
    part_of_the_graph,
    same_tensor_for_two,
]


@pytest.mark.parametrize(
    ("step", "technique", "tie"), chequered(STEPS, ["plain", "checkpointing", "chunked"], TIES)
)
def test_unusual_steps(
    make_model: Make,
    make_batch: MakeBatch,
    step: Callable[[Trained, MakeBatch], Results],
    technique: str,
    tie: str,
) -> None:
    results = []
    for chosen in (None, host()):
        model = make_model(num_hidden_layers=3, tie_word_embeddings=tie == "tied")
        trained = prepare(model, chosen, **TECHNIQUES[technique])
        results.append(step(trained, make_batch))
    assert_same(*results)


def test_a_changed_host_copy_is_what_the_next_step_computes_with(
    make_model: Make, make_batch: MakeBatch
) -> None:
    """What an optimizer on the host does: several steps of gradient descent."""
    results = []
    for chosen in (None, host()):
        trained = prepare(make_model(), chosen)
        losses = []
        for seed in range(4):
            loss = loss_of(trained, make_batch(seed))
            loss.backward()
            losses.append(loss.detach())
            if trained.stream is not None:
                trained.stream.release()
            descend(trained)
        results.append((losses, parameters_of(trained)))
    assert_same(*results)


@torch.no_grad()
def descend(trained: Trained) -> None:
    for parameter, values in values_of(trained).items():
        assert parameter.grad is not None
        values.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None


def values_of(trained: Trained) -> dict[nn.Parameter, torch.Tensor]:
    """Where parameters live."""
    values = {}
    for parameter in trained.root.parameters():
        at_home = None if trained.stream is None else trained.stream.host_values(parameter)
        values[parameter] = parameter.data if at_home is None else at_home
    return values


def parameters_of(trained: Trained) -> dict[str, torch.Tensor]:
    values = values_of(trained)
    return {name: values[parameter] for name, parameter in trained.root.named_parameters()}


# Where the bytes are


class Watching(Ledger):
    """Knows the most parameters that have been on the device at once."""

    most_bytes = 0

    def _add(self, record: Any, change: int) -> None:
        super()._add(record, change)
        now = self._now[Tier.DEVICE][Kind.PARAMETERS]
        self.most_bytes = max(self.most_bytes, now)


def unit_bytes(unit: Unit) -> int:
    return sum(p.numel() * p.element_size() for p in unit.parameters)


@pytest.mark.parametrize(
    ("technique", "prefetch"), chequered(["plain", "checkpointing", "chunked", "4 bits"], range(3))
)
def test_as_many_units_on_the_device_as_compute_and_are_fetched_ahead(
    make_model: Make, make_batch: MakeBatch, technique: str, prefetch: int
) -> None:
    with Watching() as counting:
        model = make_model(num_hidden_layers=5, tie_word_embeddings=False)
        counting.adopt(model)
        trained = prepare(model, host(prefetch=prefetch), **TECHNIQUES[technique])
        assert Kind.PARAMETERS not in counting.kinds(Tier.DEVICE)
        sizes = [unit_bytes(unit) for unit in trained.units]
        assert counting.kinds(Tier.HOST)[Kind.PARAMETERS] == sum(sizes)
        counting.most_bytes = 0
        two_micro_batches(trained, make_batch)
        assert trained.stream is not None
        trained.stream.release()
        assert Kind.PARAMETERS not in counting.kinds(Tier.DEVICE)
        assert counting.kinds(Tier.HOST)[Kind.PARAMETERS] == sum(sizes)
    windows = [sum(sizes[first : first + 1 + prefetch]) for first in range(len(sizes))]
    assert counting.most_bytes == max(windows)
    assert counting.most_bytes <= max(sizes) * (1 + prefetch)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.99])
def test_the_first_layers_stream_and_the_rest_stays(
    make_model: Make, make_batch: MakeBatch, fraction: float
) -> None:
    with Watching() as counting:
        model = make_model(num_hidden_layers=5)
        counting.adopt(model)
        trained = prepare(model, host(fraction, prefetch=0))
        leaving = {0.2: 1, 0.5: 3, 0.99: 5}[fraction]
        sizes = [unit_bytes(unit) for unit in trained.units]
        stays = sum(sizes) - leaving * sizes[1]
        assert counting.kinds(Tier.DEVICE)[Kind.PARAMETERS] == stays
        counting.most_bytes = 0
        two_micro_batches(trained, make_batch)
    assert counting.most_bytes == stays + sizes[1]
    assert trained.stream is not None
    streaming = [
        unit.name
        for unit in trained.units
        if all(trained.stream.host_values(p) is not None for p in unit.parameters)
    ]
    assert streaming == [f"model.layers.{index}" for index in range(leaving)]


@pytest.mark.parametrize(
    ("technique", "tie"), chequered(["plain", "checkpointing", "4 bits chunked", "lora"], TIES)
)
def test_a_dry_run_counts_the_same_bytes(
    make_model: Make, make_batch: MakeBatch, technique: str, tie: str
) -> None:
    counted = []
    for fake in (True, False):
        with fake_tensors() if fake else Ledger():
            model = make_model(num_hidden_layers=3, tie_word_embeddings=tie == "tied")
            ids = torch.zeros(2, 11, dtype=torch.long)
            with Watching() as counting:
                counting.adopt(model)
                trained = prepare(model, host(), transfer=Transfer(CPU), **TECHNIQUES[technique])
                loss_of(trained, (ids, ids)).backward()
                counted.append((counting.most_bytes, counting.kinds(Tier.HOST)))
    assert counted[0] == counted[1]


def test_parameters_that_are_part_of_a_larger_storage_get_their_own(
    make_model: Make, make_batch: MakeBatch
) -> None:
    """As those are that are loaded from a file that is mapped into memory."""
    results = []
    for chosen in (None, host()):
        model = make_model()
        everything = torch.cat([p.data.view(-1) for p in model.parameters()])
        begin = 0
        for parameter in model.parameters():
            part = everything[begin : begin + parameter.numel()]
            parameter.data = part.view(parameter.shape)
            begin += parameter.numel()
        trained = prepare(model, chosen)
        assert everything.untyped_storage().nbytes()
        results.append(two_micro_batches(trained, make_batch))
    assert_same(*results)


# What goes wrong


@pytest.mark.parametrize(("room_bytes", "prefetch"), chequered([1_000, 6_000, 14_000], [0, 1]))
def test_running_out_of_memory_leaves_nothing_behind(
    make_model: Make, make_batch: MakeBatch, room_bytes: int, prefetch: int
) -> None:
    """In a fetch or in what is computed; the next step is what it would have been."""
    expected = two_micro_batches(prepare(make_model(), None), make_batch)
    counting = Ledger()
    with counting:
        model = make_model()
        counting.adopt(model)
        trained = prepare(model, host(prefetch=prefetch))
        assert trained.stream is not None
        counting.limits[Tier.DEVICE] = counting.total_bytes(Tier.DEVICE) + room_bytes
        with pytest.raises(torch.OutOfMemoryError):
            two_micro_batches(trained, make_batch)
        trained.root.zero_grad()
        counting.limits.clear()
        again = two_micro_batches(trained, make_batch)
        trained.stream.release()
        assert Kind.PARAMETERS not in counting.kinds(Tier.DEVICE)
    assert_same(expected, again)


def test_values_that_are_not_final_are_not_fetched_ahead(
    make_model: Make, make_batch: MakeBatch
) -> None:
    """A unit whose update goes on is fetched when it is used, which is when it has been waited
    for."""
    early = Transfer(CPU)  # reads what it copies at once
    trained = prepare(make_model(num_hidden_layers=3), host(prefetch=2), transfer=early)
    assert trained.stream is not None
    expected = loss_of(trained, make_batch(0)).detach()
    trained.stream.release()
    unfinished = {unit: take_values(trained.stream, unit) for unit in trained.units}

    def finish(unit: Unit) -> None:
        assert trained.stream is not None
        for parameter, values in unfinished.pop(unit, {}).items():
            at_home = trained.stream.host_values(parameter)
            assert at_home is not None
            at_home.copy_(values)

    for unit in trained.units:
        unit.before_use.insert(0, lambda unit=unit: finish(unit))  # type: ignore[misc]
    trained.stream.is_final = lambda unit: unit not in unfinished
    assert torch.equal(loss_of(trained, make_batch(0)), expected)
    assert not unfinished


def take_values(stream: ParameterStream, unit: Unit) -> dict[nn.Parameter, torch.Tensor]:
    """A unit's values, in whose place on the host is nonsense afterwards."""
    taken = {}
    for parameter in unit.parameters:
        at_home = stream.host_values(parameter)
        assert at_home is not None
        taken[parameter] = at_home.clone()
        at_home.fill_(float("nan"))
    return taken


def test_a_missing_wait_shows(
    make_model: Make, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Visitors, "order", lambda self: None)
    trained = prepare(make_model(), host())
    assert not torch.isfinite(loss_of(trained, make_batch(0)))


def test_a_missing_wait_in_backward_shows(
    make_model: Make, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = prepare(make_model(num_hidden_layers=4), host())
    loss = loss_of(trained, make_batch(0))
    monkeypatch.setattr(Visitors, "order", lambda self: None)
    loss.backward()
    assert not all(bool(torch.isfinite(g).all()) for g in gradients_of(trained).values())


def test_what_was_fetched_for_nothing_is_waited_for(make_model: Make) -> None:
    """Else the host's values could change while they are being copied."""
    trained = prepare(make_model(num_hidden_layers=4), host(prefetch=2))
    assert isinstance(trained.transfer, PostponedTransfer)
    assert trained.stream is not None
    trained.stream.use(trained.units[1])
    assert trained.transfer.pending
    trained.stream.release()
    assert not trained.transfer.pending


# Ranks that share


@pytest.mark.slow
def test_shards_stream_like_whole_parameters(tmp_path: Path) -> None:
    """On two real ranks; the program compares."""
    path = os.pathsep.join(filter(None, [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
