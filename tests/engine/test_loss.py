from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.engine.loss import apply_loss, chunked_causal_loss
from tightfit.errors import UnsupportedError
from tightfit.facts.attention import default_attention
from tightfit.ledger import Ledger
from tightfit.policies import (
    AttentionKernel,
    AttentionPolicy,
    LossKind,
    LossPolicy,
    Policies,
    Tier,
)

VOCABULARY, HIDDEN = 37, 12
Make = Callable[..., Any]
# fp32 sums of 37 terms and of 20 tokens in another order: a few units in the last place.
CLOSE = {"rtol": 2e-6, "atol": 1e-7}


def head_and_inputs(
    bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(2, 10, HIDDEN).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, 10))
    labels[0, :4] = -100
    labels[1, 7] = -100
    return head, hidden, labels


def full_loss(
    hidden: torch.Tensor, labels: torch.Tensor, head: nn.Linear, trained: int | None
) -> torch.Tensor:
    logits = head(hidden)[:, :-1].flatten(0, 1).float()
    targets = labels[:, 1:].flatten()
    if trained is None:
        return nn.functional.cross_entropy(logits, targets)
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / trained


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 20, 1000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained", [None, 40])
def test_chunks_have_the_loss_and_gradients_of_the_whole(
    chunk_tokens: int, bias: bool, trained: int | None
) -> None:
    results = []
    for chunked in (True, False):
        head, hidden, labels = head_and_inputs(bias)
        if chunked:
            loss = chunked_causal_loss(hidden, labels, head, chunk_tokens, trained)
        else:
            loss = full_loss(hidden, labels, head, trained)
        (loss * 3).backward()
        results.append([loss, hidden.grad, *(p.grad for p in head.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_large_logits_do_not_overflow() -> None:
    head, hidden, labels = head_and_inputs(bias=False)
    loss = chunked_causal_loss(hidden * 1e4, labels, head, 3)
    torch.testing.assert_close(loss, full_loss(hidden * 1e4, labels, head, None))
    loss.backward()
    assert bool(hidden.grad.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_only_the_wanted_gradients_are_made(frozen: str) -> None:
    head, hidden, labels = head_and_inputs(bias=True)
    (head if frozen == "head" else hidden).requires_grad_(False)
    with Ledger() as counting:
        loss = chunked_causal_loss(hidden, labels, head, 3)
        wanted = hidden if frozen == "head" else head.weight
        size = wanted.nbytes + (0 if frozen == "head" else head.bias.nbytes)
        assert counting.kinds(Tier.DEVICE)[Kind.GRADIENTS] == size
        loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (head.weight.grad is None) == (frozen == "head")


def test_without_gradients_none_are_made() -> None:
    head, hidden, labels = head_and_inputs(bias=False)
    with Ledger() as counting, torch.no_grad():
        loss = chunked_causal_loss(hidden, labels, head, 3)
    assert not loss.requires_grad
    kinds = {kind for tiers in counting.sections().values() for kind in tiers[Tier.DEVICE]}
    assert Kind.GRADIENTS not in kinds
    assert counting.peak_bytes(Tier.DEVICE) < 5 * 3 * VOCABULARY * 4


def test_backward_twice_is_refused() -> None:
    head, hidden, labels = head_and_inputs(bias=False)
    loss = chunked_causal_loss(hidden, labels, head, 3)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="twice"):
        loss.backward()


def test_bf16_adds_up_in_fp32() -> None:
    """With 19 chunks of one token the weight's gradient is off by the rounding of the result
    alone; bf16 sums would be off several times as much."""
    head, hidden, labels = head_and_inputs(bias=True, dtype=torch.bfloat16)
    exact_head, exact_hidden, _ = head_and_inputs(bias=True)
    with torch.no_grad():  # the same rounded numbers, computed with in fp32
        for exact, rounded in zip(exact_head.parameters(), head.parameters(), strict=True):
            exact.copy_(rounded)
        exact_hidden.copy_(hidden)
    expected = full_loss(exact_hidden, labels, exact_head, 20)
    expected.backward()
    loss = chunked_causal_loss(hidden, labels, head, 1, 20)
    loss.backward()
    assert loss.dtype is torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype is head.weight.grad.dtype is torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(loss, expected, rtol=4e-3, atol=0)
    wanted = exact_head.weight.grad
    assert wanted is not None
    found = head.weight.grad.float()  # type: ignore[union-attr]
    # 2**-8 from each of the logits, their gradients, the products and the result, at the scale
    # of the largest.
    assert float((found - wanted).abs().max()) < 4 * 2**-8 * float(wanted.abs().max())


def test_a_head_that_is_no_linear_layer_is_refused(make_model: Make) -> None:
    model = make_model(tie_word_embeddings=False)
    model.lm_head = nn.Bilinear(1, 1, 1)
    with pytest.raises(UnsupportedError, match=r"output layer is .*Bilinear.*set loss: full"):
        apply_loss(model, LossPolicy(LossKind.CHUNKED))


def test_a_model_that_changes_its_logits_is_refused(make_model: Make, make_batch: Make) -> None:
    """Not known from its config: seen when what reaches the loss is not the head's output."""
    model = make_model()
    plain = model.loss_function
    assert plain is not None
    engine = fit(model, Policies(loss=LossPolicy(LossKind.CHUNKED, 4)))
    chunked = model.loss_function
    model.loss_function = lambda logits, labels, **rest: chunked(logits * 2, labels, **rest)
    ids, labels = make_batch(0)
    with pytest.raises(UnsupportedError, match="changes the logits"):
        engine.loss(ids, labels, 40)
    assert "forward" not in vars(model.lm_head), "the output layer is as it was"


def test_chunked_loss_of_peaked_logits_is_that_of_float64() -> None:
    """Real models' logits reach 40; torch's own fp32 loss is then off by 3e-6 on a CPU."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 200, 64) * 2, torch.randn(20000, 64)
    labels = torch.randint(0, 20000, (1, 200))
    head = torch.nn.Linear(64, 20000, bias=False)
    head.weight = torch.nn.Parameter(weight)
    logits = (hidden[0, :-1].double() @ weight.double().T).requires_grad_(False)
    assert logits.abs().max() > 40
    exact = torch.nn.functional.cross_entropy(logits, labels[0, 1:])
    loss = chunked_causal_loss(hidden, labels, head, chunk_tokens=64)
    assert abs(loss.item() - exact.item()) <= 2e-7 * exact.item()


@pytest.mark.parametrize("as_dict", [True, False])
def test_outputs_are_tuples_where_they_are_asked_for(
    make_model: Make, make_batch: Make, as_dict: bool
) -> None:
    ids, labels = make_batch(0)
    engine = fit(make_model(), Policies(loss=LossPolicy(LossKind.CHUNKED, 4)))
    output = engine.model(
        input_ids=ids, labels=labels, use_cache=False, output_hidden_states=True,
        return_dict=as_dict,
    )  # fmt: skip
    loss, logits = (output.loss, output.logits) if as_dict else output[:2]
    assert logits is None, "they were never made"
    assert len(output[-1]) == 3, "hidden states stay where they are"
    torch.testing.assert_close(loss, make_model()(input_ids=ids, labels=labels).loss, **CLOSE)


# Families call their loss in different ways: by name, by position, with what is left of their own.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi", "phi3", "olmo2", "gpt2",
    "gpt_neox", "falcon", "stablelm", "starcoder2", "opt", "bloom", "glm", "smollm3", "mixtral",
    "qwen2_moe", "qwen3_moe", "olmoe",
)  # fmt: skip


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 32, "num_local_experts": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "word_embed_proj_dim": 16, "ffn_dim": 24, "n_layer": 2,
        "n_head": 2, "n_embd": 16, "shared_expert_intermediate_size": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    known = CONFIG_MAPPING[family]().to_dict().keys() | {"head_dim"}
    fields = {key: value for key, value in sizes.items() if key in known}
    if family in ("falcon", "bloom"):  # theirs is not a setting
        del fields["head_dim"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_loss_and_gradients_of_the_whole(family: str) -> None:
    results = []
    for kind in LossKind:
        model = tiny(family)
        kernel = AttentionKernel(default_attention(model.config.to_dict()))
        policies = Policies(loss=LossPolicy(kind, 5), attention=AttentionPolicy(kernel))
        engine = fit(model, policies)
        ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        labels[:, :3] = -100
        torch.manual_seed(2)
        loss = engine.loss(ids, labels, 12)
        engine.backward(loss)
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    for chunked, sliced, whole in zip(*(results[i] for i in (1, 2, 0)), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sliced, whole, rtol=1e-5, atol=1e-6)
