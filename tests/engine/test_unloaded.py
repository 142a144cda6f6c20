"""A model that gets its values while it is placed trains as one that was loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.engine.regions import Region
from tightfit.engine.unloaded import Fill
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import (
    AdapterPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    Tier,
)

Make = Callable[..., LlamaForCausalLM]
MakeBatch = Callable[..., tuple[torch.Tensor, torch.Tensor]]
CPU = torch.device("cpu")
HOST, NVME = Tier.HOST, Tier.NVME
PLACEMENTS = {
    "device": PlacementPolicy(),
    "masters on host": PlacementPolicy(HOST, HOST),
    "host": PlacementPolicy(HOST, HOST, HOST),
    "half on host": PlacementPolicy(HOST, HOST, HOST, parameter_fraction=0.5),
    "nvme": PlacementPolicy(NVME, NVME, NVME, lazy_step=True),
}


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without values."""
    with torch.device("meta"):
        unloaded: PreTrainedModel = AutoModelForCausalLM.from_config(
            model.config, dtype=model.dtype
        )
    return unloaded


def filling(model: PreTrainedModel) -> Fill:
    """Values of a model, each of which is asked for once."""
    left = {name: value.detach().clone() for name, value in model.named_parameters()}

    def fill(name: str, values: torch.Tensor, region: Region) -> None:
        assert values.device == CPU
        values.copy_(left.pop(name)[region])

    fill.left = left  # type: ignore[attr-defined]
    return fill


def numbers(engine: Engine, make_batch: MakeBatch) -> list[Any]:
    seen: list[Any] = []
    for step in range(3):
        loss = engine.loss(*make_batch(step), 30)
        engine.backward(loss)
        seen += [float(loss.detach()), engine.step()]
    engine.drain()
    return seen


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("technique", ["full", "untied", "bf16", "lora", "qlora"])
def test_it_trains_as_one_that_was_loaded(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, placement: str, technique: str
) -> None:
    dtype = torch.bfloat16 if technique == "bf16" else torch.float32
    model = make_model(dtype, num_hidden_layers=3, tie_word_embeddings=technique != "untied")
    policies = Policies(
        placement=PLACEMENTS[placement],
        precision=PrecisionPolicy("bf16" if technique == "bf16" else "fp32"),
        adapter=AdapterPolicy(rank=2) if "lora" in technique else None,
        quantisation=QuantisationPolicy() if technique == "qlora" else None,
    )
    fill, empty = filling(model), on_meta(model)
    results: list[Any] = []
    for each, values in ((model, None), (empty, fill)):
        torch.manual_seed(1)
        engine = fit(each, policies, offload_folder=tmp_path, values=values)
        results.append([numbers(engine, make_batch), engine.model.state_dict()])
    assert results[0][0] == results[1][0]
    assert results[0][1].keys() == results[1][1].keys()
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    assert not fill.left  # type: ignore[attr-defined]


def test_one_parameter_at_a_time_is_on_the_host(make_model: Make, tmp_path: Path) -> None:
    model = make_model(num_hidden_layers=8)
    largest = max(4 * parameter.numel() for parameter in model.parameters())
    fill, policies = filling(model), Policies(placement=PLACEMENTS["nvme"])
    with Ledger() as counted:
        engine = fit(on_meta(model), policies, offload_folder=tmp_path, values=fill)
        kept = {tier: counted.total_bytes(tier) for tier in (HOST, Tier.DEVICE)}
        assert Kind.PARAMETERS not in counted.kinds(HOST)
    assert engine.device == CPU
    for tier, count in kept.items():
        assert counted.peak_bytes(tier) <= count + largest


def test_somebody_has_to_fill_it(make_model: Make) -> None:
    with pytest.raises(ConfigError, match="on the meta device and has no values"):
        fit(on_meta(make_model()), Policies())


def test_a_buffer_that_is_saved_with_the_model_is_filled(make_model: Make) -> None:
    model = make_model()
    model.register_buffer("odd", torch.arange(3.0))
    values = {**dict(model.named_parameters()), "odd": model.odd}
    empty = on_meta(model)
    empty.register_buffer("odd", torch.empty(3, device="meta"))

    def fill(name: str, tensor: torch.Tensor, region: Region) -> None:
        tensor.copy_(values[name][region])

    engine = fit(empty, Policies(), values=fill)
    assert torch.equal(engine.model.odd, torch.arange(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_a_buffer_that_nobody_computes_is_refused(make_model: Make, dtype: torch.dtype) -> None:
    model = make_model()
    empty = on_meta(model)
    empty.register_buffer("odd", torch.empty(3, dtype=dtype, device="meta"), persistent=False)
    with pytest.raises(UnsupportedError, match=r"^odd of this model is not computed"):
        fit(empty, Policies(), values=filling(model))


def test_a_mask_that_the_model_computes_is_that_of_one_that_was_loaded() -> None:
    """A constant of truth values, which no value of its own shows to be unset."""
    model = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(vocab_size=32, n_positions=6, n_embd=8, n_layer=1, n_head=2)
    )
    engine = fit(on_meta(model), Policies(), values=filling(model))
    assert torch.equal(engine.model.transformer.bias, model.transformer.bias)
    assert model.transformer.bias.sum() == 6 * 7 / 2
