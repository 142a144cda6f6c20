from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.taken import chequered, only
from torch import nn

from tightfit.engine.apply import fit
from tightfit.engine.whole_modules import whole_parameters
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import (
    AdapterPolicy,
    LossKind,
    LossPolicy,
    OptimizerPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
)

Make = Callable[..., Any]
ENDS = ("embed_tokens", "lm_head", "norm")
OPTIMIZER = OptimizerPolicy(learning_rate=1e-2, max_grad_norm=0.0)


def policies(*modules: str, **others: Any) -> Policies:
    return Policies(
        adapter=AdapterPolicy(rank=2, modules_to_save=modules), optimizer=OPTIMIZER, **others
    )


def step(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    loss = engine.loss(*batch, 30)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def drawn(adapted: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapted.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("kind", only([LossKind.CHUNKED], LossKind))
def test_they_train_as_pefts_copies_do(
    make_model: Make, make_batch: Make, plain_optimizer: Make, kind: LossKind
) -> None:
    """peft trains a copy of each, and of a model that is not tied the same numbers."""
    engine = fit(
        make_model(tie_word_embeddings=False), policies(*ENDS, loss=LossPolicy(kind, 5, 7))
    )
    config = LoraConfig(r=2, lora_alpha=16, target_modules="all-linear", modules_to_save=[*ENDS])
    copied = get_peft_model(make_model(tie_word_embeddings=False), config)
    start = drawn(engine.model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name in start:
                parameter.copy_(start[name])
    optimizer = plain_optimizer(copied, OPTIMIZER)
    for seed in range(3):
        ids, labels = make_batch(seed)
        loss = copied(input_ids=ids, labels=labels, num_items_in_batch=30).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step(engine, (ids, labels)) == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(("tied", "precision"), chequered([True, False], ["fp32", "bf16"]))
def test_peft_loads_what_is_saved(
    make_model: Make, make_batch: Make, tmp_path: Path, tied: bool, precision: str
) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = make_model(dtype, tie_word_embeddings=tied)
    ends = ("embed_tokens",) if precision == "fp32" else ("embed_tokens", "lm_head")
    engine = fit(model, policies(*ends, "norm", precision=PrecisionPolicy(precision)))
    losses = [step(engine, make_batch(0)) for _ in range(4)]
    assert losses[-1] < losses[0]
    engine.model.save_pretrained(tmp_path)
    base = make_model(dtype, tie_word_embeddings=tied)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    ids, _ = make_batch(1)
    with torch.no_grad():
        expected = engine.model.eval()(input_ids=ids).logits
        assert expected.dtype is dtype
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)


def test_what_is_tied_stays_tied(make_model: Make, make_batch: Make) -> None:
    model = make_model()
    engine = fit(model, policies("lm_head"))
    step(engine, make_batch(0))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert engine.model.peft_config["default"].modules_to_save == ["lm_head", "embed_tokens"]
    assert len(whole_parameters(engine.model)) == 2


def test_on_16_bits_they_are_fp32_and_compute_in_16_bits(
    make_model: Make, make_batch: Make
) -> None:
    """With gradients of fp32, which small updates need."""
    seen: list[torch.dtype] = []
    model = make_model(torch.bfloat16)
    engine = fit(model, policies(*ENDS, precision=PrecisionPolicy("bf16")))
    model.model.layers[0].register_forward_pre_hook(lambda m, given: seen.append(given[0].dtype))
    engine.backward(engine.loss(*make_batch(0), 30))
    assert seen == [torch.bfloat16]
    whole = set(whole_parameters(engine.model).values())
    assert len(whole) == 2 + 4, "the tied matrix, the last norm and two of each layer"
    assert {p.dtype for p in whole} == {torch.float32}
    frozen = {p.dtype for p in engine.model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}


def test_a_base_of_4_bits_can_have_them(make_model: Make, make_batch: Make) -> None:
    engine = fit(make_model(), policies(*ENDS, quantisation=QuantisationPolicy()))
    losses = [step(engine, make_batch(0)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("modules", "others", "error", "message"),
    [
        (["embed"], {}, ConfigError, "no such module.*model.embed_tokens and lm_head"),
        (["layers"], {}, UnsupportedError, "is a list of modules.*such as model.layers.0"),
        (["q_proj"], {}, UnsupportedError, "q_proj would be trained whole and have adapters"),
        (
            ["q_proj"],
            {"quantisation": QuantisationPolicy()},
            UnsupportedError,
            "quantization_bit: 4 freezes: name them in lora_target",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    make_model: Make, modules: list[str], others: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(make_model(), policies(*modules, **others))


def test_a_tied_embedding_on_two_stages_is_refused(
    make_model: Make, forked_ranks: Callable[..., list[Any]]
) -> None:
    def work(rank: int) -> str:
        try:
            fit(make_model(), policies("lm_head", sharding=ShardingPolicy(2, pipeline_parallel=2)))
        except UnsupportedError as error:
            return str(error)
        return "nothing"

    for said in forked_ranks(work, 2):
        assert "leave it out there, or set pipeline_parallel_size 1" in said
