"""Placement, checkpointing, accumulation and LoRA change no bit of what plain training does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from tightfit.bill.table import Kind, Phase
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    Tier,
)

STEPS = 8
HOST = PlacementPolicy(Tier.HOST, Tier.HOST)
OPTIMIZER = OptimizerPolicy(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.7)
CHECKPOINTING = CheckpointingPolicy(True)
Make = Callable[..., Any]
Trajectory = tuple[list[float], list[float], dict[str, torch.Tensor]]


@pytest.fixture
def run_plain(make_batch: Make, trained: Make, plain_optimizer: Make) -> Make:
    """A loop as people write it: losses, norms and parameters after it."""

    def run(model: nn.Module, policy: OptimizerPolicy, pieces: int = 1) -> Trajectory:
        optimizer = plain_optimizer(model, policy)
        losses, norms = [], []
        for step in range(STEPS):
            total = 0.0
            ids, labels = make_batch(step)
            for part_ids, part_labels in split(ids, labels, pieces):
                loss = model(
                    input_ids=part_ids, labels=part_labels, num_items_in_batch=trained(labels)
                ).loss
                loss.backward()
                total += loss.item()
            limit = policy.max_grad_norm or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            norms.append(float(norm))
        return losses, norms, parameters_of(model)

    return run


@pytest.fixture
def run_engine(make_batch: Make, trained: Make) -> Make:
    """The same with an engine."""

    def run(engine: Engine, pieces: int = 1) -> Trajectory:
        losses, norms = [], []
        for step in range(STEPS):
            total = 0.0
            ids, labels = make_batch(step)
            for part_ids, part_labels in split(ids, labels, pieces):
                loss = engine.loss(part_ids, part_labels, trained(labels))
                engine.backward(loss)
                total += loss.item()
            losses.append(total)
            norms.append(engine.step())
        return losses, norms, parameters_of(engine.model)

    return run


def split(
    ids: torch.Tensor, labels: torch.Tensor, pieces: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(ids.chunk(pieces), labels.chunk(pieces), strict=True)


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same_bits(found: Trajectory, expected: Trajectory) -> None:
    assert found[0] == expected[0], "losses"
    assert found[1] == expected[1], "norms"
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        assert torch.equal(found[2][name], value), name
    assert expected[0][-1] < expected[0][0] or len(set(expected[0])) == STEPS


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [CheckpointingPolicy(), CHECKPOINTING], ids=["", "ckpt"])
@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_same_bits_as_a_plain_loop(
    make_model: Make,
    run_plain: Make,
    run_engine: Make,
    pieces: int,
    tied: bool,
    checkpointing: CheckpointingPolicy,
    placement: PlacementPolicy,
) -> None:
    expected = run_plain(make_model(tie_word_embeddings=tied), OPTIMIZER, pieces)
    policies = Policies(placement=placement, checkpointing=checkpointing, optimizer=OPTIMIZER)
    found = run_engine(fit(make_model(tie_word_embeddings=tied), policies), pieces)
    assert_same_bits(found, expected)
    assert any(norm > OPTIMIZER.max_grad_norm for norm in expected[1]), "clipping is tested"


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_same_bits_without_clipping(
    make_model: Make, run_plain: Make, run_engine: Make, placement: PlacementPolicy
) -> None:
    optimizer = replace(OPTIMIZER, max_grad_norm=0.0)
    expected = run_plain(make_model(), optimizer)
    found = run_engine(fit(make_model(), Policies(placement=placement, optimizer=optimizer)))
    assert_same_bits(found, expected)
    clipped = run_plain(make_model(), OPTIMIZER)
    assert not torch.equal(clipped[2]["model.norm.weight"], expected[2]["model.norm.weight"])


@pytest.mark.parametrize("checkpointing", [CheckpointingPolicy(), CHECKPOINTING], ids=["", "ckpt"])
@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_lora_has_the_bits_of_peft(
    make_model: Make,
    run_plain: Make,
    run_engine: Make,
    placement: PlacementPolicy,
    checkpointing: CheckpointingPolicy,
) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    policies = Policies(
        placement=placement,
        checkpointing=checkpointing,
        optimizer=OPTIMIZER,
        adapter=AdapterPolicy(rank=4, alpha=8),
    )
    engine = fit(make_model(), policies)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        plain = get_peft_model(make_model(), config)
    plain.load_state_dict(engine.model.state_dict())  # layers draw their adapters by their names
    expected = run_plain(plain, OPTIMIZER, 2)
    found = run_engine(engine, 2)
    assert_same_bits(found, expected)
    start = parameters_of(make_model())
    for name, value in found[2].items():
        if "lora" not in name:
            bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, start[bare]), f"{name} is frozen"


def test_several_backward_calls_equal_one_sum(make_model: Make, make_batch: Make) -> None:
    """A person's own loop: losses of their own, gradients that add up until the step."""
    norms = []
    for placement in (PlacementPolicy(), HOST):
        engine = fit(make_model(), Policies(placement=placement))
        for seed in range(3):
            ids, labels = make_batch(seed)
            engine.backward(engine.model(input_ids=ids, labels=labels).loss / 3)
        norms.append(engine.step())
    model = make_model()
    for seed in range(3):
        ids, labels = make_batch(seed)
        (model(input_ids=ids, labels=labels).loss / 3).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert norms == [expected, expected]


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_a_parameter_without_gradient_in_some_steps_is_left_alone(
    make_model: Make, make_batch: Make, plain_optimizer: Make, placement: PlacementPolicy
) -> None:
    def switched() -> LlamaForCausalLM:
        model = make_model()
        torch.manual_seed(1)
        model.branch = nn.Linear(16, 16)
        return model

    def loss_of(model: Any, seed: int) -> torch.Tensor:
        ids, labels = make_batch(seed)
        loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
        if seed % 2:
            loss = loss + model.branch(torch.ones(1, 16)).square().sum()
        return loss

    plain = switched()
    optimizer = plain_optimizer(plain, OPTIMIZER)
    engine = fit(switched(), Policies(placement=placement, optimizer=OPTIMIZER))
    for seed in range(STEPS):
        before = engine.model.branch.weight.detach().clone()  # type: ignore[union-attr, operator]
        loss_of(plain, seed).backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), OPTIMIZER.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss_of(engine.model, seed))
        assert engine.step() == norm
        assert torch.equal(before, engine.model.branch.weight) == (seed % 2 == 0)  # type: ignore[union-attr, arg-type]
    expected = parameters_of(plain)
    for name, value in parameters_of(engine.model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_gradients_that_are_not_finite_change_nothing(
    make_model: Make, make_batch: Make, placement: PlacementPolicy, bad: float
) -> None:
    policies = Policies(placement=placement, optimizer=OPTIMIZER)
    engine, other = fit(make_model(), policies), fit(make_model(), policies)
    for seed in range(4):
        for each in (engine, other):
            ids, labels = make_batch(seed)
            each.backward(each.loss(ids, labels, 40))
            each.step()
        ids, labels = make_batch(100 + seed)
        states = states_of(engine)
        engine.backward(engine.loss(ids, labels, 40) * bad)
        norm = engine.step()
        assert norm != norm or norm == float("inf")
        assert all(torch.equal(a, b) for a, b in zip(states, states_of(engine), strict=True))
    for a, b in zip(states_of(engine), states_of(other), strict=True):
        assert torch.equal(a, b)


def states_of(engine: Engine) -> list[torch.Tensor]:
    states = [
        value.clone() for state in engine.optimizer.state.values() for value in state.values()
    ]
    return states + [parameter.detach().clone() for parameter in engine.model.parameters()]


@pytest.mark.parametrize("kind", list(LossKind))
def test_the_loss_does_not_depend_on_micro_batches(
    make_model: Make, run_engine: Make, kind: LossKind
) -> None:
    """Up to 1e-5, the rounding of fp32 sums in another order, grown over 8 steps."""
    policies = Policies(loss=LossPolicy(kind, 5), optimizer=OPTIMIZER)
    whole, halves, quarters = (run_engine(fit(make_model(), policies), n) for n in (1, 2, 4))
    for other in (halves, quarters):
        torch.testing.assert_close(other[0], whole[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(other[1], whole[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", list(LossKind))
def test_a_micro_batch_without_trained_tokens_adds_nothing(
    make_model: Make, make_batch: Make, trained: Make, kind: LossKind
) -> None:
    ids, labels = make_batch(0)
    norms = []
    for with_empty in (False, True):
        engine = fit(make_model(), Policies(loss=LossPolicy(kind, 5)))
        engine.backward(engine.loss(ids, labels, trained(labels)))
        if with_empty:
            empty = engine.loss(ids, torch.full_like(labels, -100), trained(labels))
            assert empty.item() == 0
            engine.backward(empty)
        norms.append(engine.step())
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize("kind", list(LossKind))
def test_a_global_batch_without_trained_tokens_has_no_loss(
    make_model: Make, make_batch: Make, kind: LossKind
) -> None:
    ids, labels = make_batch(0)
    engine = fit(make_model(), Policies(loss=LossPolicy(kind, 5)))
    loss = engine.loss(ids, torch.full_like(labels, -100), 0)
    engine.backward(loss)
    assert (loss.item(), engine.step()) == (0, 0)


@pytest.mark.parametrize("kind", list(LossKind))
def test_evaluation_is_the_sum_over_trained_tokens(
    make_model: Make, make_batch: Make, kind: LossKind
) -> None:
    ids, labels = make_batch(0)
    engine = fit(make_model(), Policies(loss=LossPolicy(kind, 5)))
    logits = make_model()(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum").item()
    torch.testing.assert_close(engine.evaluation_loss(ids, labels), expected, rtol=1e-6, atol=0)
    assert engine.model.training
    engine.model.eval()
    engine.evaluation_loss(ids, labels)
    assert not engine.model.training, "the mode is the one before"


@pytest.mark.parametrize("adapter", [None, AdapterPolicy(rank=2)], ids=["full", "lora"])
def test_without_labels_the_model_is_what_it_was(
    make_model: Make, make_batch: Make, adapter: AdapterPolicy | None
) -> None:
    ids, labels = make_batch(0)
    plain = make_model().eval()
    policies = Policies(
        loss=LossPolicy(LossKind.CHUNKED, 5), checkpointing=CHECKPOINTING, adapter=adapter
    )
    engine = fit(make_model(), policies)
    engine.backward(engine.loss(ids, labels, 40))  # has to leave no trace in the output layer
    model: Any = engine.model.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        prompt = {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])}
        wanted = plain.generate(**prompt, max_new_tokens=6, do_sample=False)
        found = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, wanted)
    assert found.shape[1] > ids.shape[1]


def test_gemma2_trains_with_the_full_loss_and_refuses_chunks(make_batch: Make) -> None:
    """Its logits are capped between the output layer and the loss, its scores in attention."""
    eager = AttentionPolicy(AttentionKernel.EAGER)
    config = Gemma2Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    with pytest.raises(UnsupportedError, match=r"final_logit_softcapping; set loss: full"):
        fit(
            Gemma2ForCausalLM(config),
            Policies(loss=LossPolicy(LossKind.CHUNKED), attention=eager),
        )
    engine = fit(
        Gemma2ForCausalLM(config), Policies(optimizer=OPTIMIZER, placement=HOST, attention=eager)
    )
    ids, labels = make_batch(0)
    losses = []
    for _ in range(5):
        loss = engine.loss(ids, labels, 40)
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_a_step_given_up_leaves_no_gradient(
    make_model: Make, make_batch: Make, placement: PlacementPolicy
) -> None:
    """The device runs out at every place of forward and backward; then it works."""
    policies = Policies(placement=placement, optimizer=OPTIMIZER)
    ids, labels = make_batch(0)
    expected = fit(make_model(), policies)
    for _ in range(2):
        expected.backward(expected.loss(ids, labels, 40))
    expected_norm = expected.step()
    failures = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    with Ledger() as counting:
        model = make_model()
        counting.adopt(model)
        engine = fit(model, policies)
        start = counting.total_bytes(Tier.DEVICE)
        for allowance in range(0, 400_000, 6000):
            counting.limits = {Tier.DEVICE: start + allowance}
            if not runs_out(engine, ids, labels, counting, failures):
                break
            counting.limits = {}
            engine.discard_gradients()
            assert counting.total_bytes(Tier.DEVICE) == start
        counting.limits = {}
        engine.discard_gradients()
        assert failures[Phase.FORWARD] > 1
        assert failures[Phase.BACKWARD] > 1
        for _ in range(2):
            engine.backward(engine.loss(ids, labels, 40))
        assert engine.step() == expected_norm
    for name, value in parameters_of(expected.model).items():
        assert torch.equal(value, parameters_of(engine.model)[name])


def runs_out(
    engine: Engine,
    ids: torch.Tensor,
    labels: torch.Tensor,
    counting: Ledger,
    failures: dict[Phase, int],
) -> bool:
    try:
        for _ in range(2):
            engine.backward(engine.loss(ids, labels, 40))
    except torch.OutOfMemoryError:
        failures[counting.section[0]] = failures.get(counting.section[0], 0) + 1
        return True
    return False


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
def test_gradients_wait_on_their_tier(
    make_model: Make, make_batch: Make, placement: PlacementPolicy
) -> None:
    ids, labels = make_batch(0)
    with Ledger() as counting:
        model = make_model()
        counting.adopt(model)
        engine = fit(model, Policies(placement=placement))
        engine.backward(engine.loss(ids, labels, 40))
        found = {tier: counting.kinds(tier).get(Kind.GRADIENTS, 0) for tier in Tier}
        whole = sum(parameter.nbytes for parameter in model.parameters())
        assert found == dict.fromkeys(Tier, 0) | {placement.gradients: whole}


@pytest.mark.parametrize("placement", [PlacementPolicy(), HOST], ids=["device", "host"])
@pytest.mark.parametrize("loss", [LossKind.FULL, LossKind.CHUNKED])
def test_a_model_that_was_fitted_is_not_fitted_again(
    make_model: Make, placement: PlacementPolicy, loss: LossKind
) -> None:
    model = make_model()
    fit(model, Policies(placement=placement, loss=LossPolicy(loss)))
    with pytest.raises(ConfigError, match=r"fitted before.*load it again"):
        fit(model, Policies(placement=placement, loss=LossPolicy(loss)))


def test_a_model_without_anything_to_train_is_refused(make_model: Make) -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        fit(make_model().requires_grad_(False), Policies())
