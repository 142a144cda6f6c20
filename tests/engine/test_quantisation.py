"""Run as a script with arguments, this file is one rank of `test_two_ranks_share_the_base`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tightfit import ledger
from tightfit.bill.quantised import quantised_bytes
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.fakes import fake_tensors
from tightfit.engine import quantisation
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.quantisation import QuantisedLinear, apply_quantisation
from tightfit.errors import UnsupportedError
from tightfit.ledger import Ledger
from tightfit.policies import AdapterPolicy, CheckpointingPolicy, QuantisationPolicy, Tier

DOUBLE, SINGLE = QuantisationPolicy(double=True), QuantisationPolicy(double=False)
SPECIAL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **SPECIAL}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
Gradients = dict[str, torch.Tensor]


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=96, **SMALL))


def qwen2() -> PreTrainedModel:
    """With biases, a tied output layer and rows that are no whole blocks."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **SMALL))


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(hidden_size=32, intermediate_size=48, **EXPERTS, **SMALL)
    )


def gpt2() -> PreTrainedModel:
    """With weights `[in, out]`."""
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, **SPECIAL))


def falcon() -> PreTrainedModel:
    """With a class of linear layers of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, **SPECIAL))


Make = Callable[[], PreTrainedModel]
MODELS: dict[Make, set[str]] = {
    llama: {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    qwen2: {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    qwen3_moe: {"q_proj", "k_proj", "v_proj", "o_proj"},
    gpt2: {"c_attn", "c_proj", "c_fc"},
    falcon: {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
}


def made(make: Make) -> PreTrainedModel:
    """The same bits at every call, in evaluation mode: no dropout."""
    torch.manual_seed(0)
    return make().eval()


def quantised(make: Make, policy: QuantisationPolicy = DOUBLE) -> PreTrainedModel:
    model = made(make)
    apply_quantisation(model, policy)
    return model


def adapted(model: PreTrainedModel) -> nn.Module:
    """With adapters that change the output: the second factors are zero at first."""
    torch.manual_seed(1)
    with_adapters = apply_adapter(model, AdapterPolicy(rank=4))
    for name, parameter in with_adapters.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return with_adapters


def layers_of(model: nn.Module) -> dict[str, QuantisedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantisedLinear)}


def ids(batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 61, (batch, 9), generator=torch.Generator().manual_seed(2))


def loss_and_gradients(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize("make", MODELS)
def test_all_linear_layers_but_the_head(make: Make) -> None:
    model = quantised(make)
    assert {name.rsplit(".", 1)[-1] for name in layers_of(model)} == MODELS[make]
    assert type(model.get_output_embeddings()) is nn.Linear
    assert not any(
        p.requires_grad for layer in layers_of(model).values() for p in layer.parameters()
    )


@pytest.mark.parametrize("policy", [DOUBLE, SINGLE])
@pytest.mark.parametrize("make", MODELS)
def test_trains_as_adapters_on_the_dequantised_base(make: Make, policy: QuantisationPolicy) -> None:
    """The same operations on the same numbers, so the same bits."""
    model, plain = quantised(make, policy), made(make)
    with torch.no_grad():
        for name, layer in layers_of(model).items():
            target = plain.get_submodule(name)
            weight = layer.dequantised(torch.float32)
            target.weight.copy_(weight if isinstance(target, nn.Linear) else weight.T)
    loss, gradients = loss_and_gradients(adapted(model), ids())
    plain_loss, plain_gradients = loss_and_gradients(adapted(plain), ids())
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain_gradients.keys()
    assert len(gradients) >= 2 * len(layers_of(model))
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain_gradients[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [DOUBLE, SINGLE, QuantisationPolicy(block=256)])
def test_numbers_are_those_of_bitsandbytes(policy: QuantisationPolicy, dtype: torch.dtype) -> None:
    """Bit for bit, of more weights than are quantised at a time and several groups of scales."""
    torch.manual_seed(0)
    weight = torch.randn(192, 256).to(dtype)
    theirs = bitsandbytes.nn.Linear4bit(
        256, 192, bias=False, compress_statistics=policy.double, quant_type="nf4"
    )
    theirs.weight = bitsandbytes.nn.Params4bit(
        weight.clone(),
        requires_grad=False,
        blocksize=policy.block,
        compress_statistics=policy.double,
        quant_type="nf4",
    )
    theirs.to("cpu")
    expected = dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    values = torch.tensor(quantisation._scale_values())
    ours = QuantisedLinear(weight, None, policy, values)
    assert torch.equal(ours.weight, theirs.weight.data.view(-1))
    assert torch.equal(ours.dequantised(dtype), expected)


def test_pieces_of_a_large_weight_make_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    values = torch.tensor(quantisation._scale_values())
    whole = QuantisedLinear(weight, None, DOUBLE, values)
    monkeypatch.setattr(quantisation, "_WEIGHTS_AT_A_TIME", 5000)
    pieces = QuantisedLinear(weight, None, DOUBLE, values)
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(one, other)
    # A step of NF4 is at most 0.305 of a block's largest weight, the error at most half of it.
    assert (whole.dequantised(torch.float32) - weight).abs().max() < 0.16 * weight.abs().max()


def test_a_16_bit_model_computes_in_16_bits() -> None:
    model = made(llama).to(torch.bfloat16)
    apply_quantisation(model, DOUBLE)
    layer = layers_of(model)["model.layers.0.mlp.up_proj"]
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = nn.functional.linear(inputs, layer.dequantised(torch.bfloat16))
    assert layer(inputs).dtype is torch.bfloat16
    assert torch.equal(layer(inputs), expected)


def test_routers_derived_from_linear_layers_are_left_alone() -> None:
    class Router(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:  # noqa: A002
            return super().forward(input), 1

    model = made(llama)
    router = Router(64, 4)
    model.get_submodule("model.layers.0.mlp").add_module("gate", router)
    apply_quantisation(model, DOUBLE)
    assert model.get_submodule("model.layers.0.mlp.gate") is router


# What the ledger sees


def layer_bytes(model: nn.Module, policy: QuantisationPolicy) -> list[int]:
    return [
        quantised_bytes((layer.out_features, layer.in_features), policy)
        for layer in layers_of(model).values()
    ]


@pytest.mark.parametrize("policy", [DOUBLE, SINGLE])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_parameters_have_the_bytes_of_the_closed_form(
    make: Make, policy: QuantisationPolicy
) -> None:
    model = made(make)
    with Ledger() as counting:
        counting.adopt(model)
        apply_quantisation(model, policy)
        kinds = counting.kinds(Tier.DEVICE)
    in_layers = {id(p) for x in layers_of(model).values() for p in x.quantised_parameters()}
    others = sum(p.nbytes for p in model.parameters() if id(p) not in in_layers)
    assert kinds[Kind.PARAMETERS] == sum(layer_bytes(model, policy)) + others
    assert Kind.TEMPORARIES not in kinds


@pytest.mark.parametrize("policy", [DOUBLE, SINGLE])
def test_each_weight_is_freed_before_the_next_is_quantised(policy: QuantisationPolicy) -> None:
    model = made(llama)
    with Ledger() as counting:
        counting.adopt(model)
        before_bytes = counting.total_bytes(Tier.DEVICE)
        apply_quantisation(model, policy)
        added_bytes = counting.peak_bytes(Tier.DEVICE) - before_bytes
    sizes = layer_bytes(model, policy)
    # A layer, what its kernels return, and its scales on their way; not all layers.
    assert 0 < added_bytes < 3 * max(sizes) < sum(sizes)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_nothing_dequantised_is_kept_for_backward(make: Make) -> None:
    def kept_bytes(model: nn.Module) -> dict[Kind, int]:
        with Ledger() as counting:
            counting.adopt(model)
            ledger.set_phase(Phase.FORWARD)
            loss = model(input_ids=ids(), labels=ids()).loss
            kinds = dict(counting.kinds(Tier.DEVICE))
        assert loss.requires_grad
        return {kind: kinds[kind] for kind in kinds if kind not in (Kind.PARAMETERS, Kind.BUFFERS)}

    assert kept_bytes(adapted(quantised(make))) == kept_bytes(adapted(made(make)))


def test_outputs_are_activations_where_gradients_are_on() -> None:
    layer = layers_of(quantised(llama))["model.layers.0.mlp.up_proj"]
    inputs = torch.randn(3, 64, requires_grad=True)
    with Ledger() as counting:
        ledger.set_phase(Phase.FORWARD)
        output = layer(inputs)
        assert counting.kinds(Tier.DEVICE) == {Kind.ACTIVATIONS: output.nbytes}
        with torch.no_grad():
            output = layer(inputs)
        assert counting.kinds(Tier.DEVICE) == {Kind.TEMPORARIES: output.nbytes}


def sections_of_a_step(
    make: Make, policy: QuantisationPolicy, checkpointing: CheckpointingPolicy
) -> Any:
    """What the ledger counts of quantising, adding adapters, and a step."""
    model = make()
    with Ledger() as counting:
        counting.adopt(model)
        ledger.set_phase(Phase.INIT)
        apply_quantisation(model, policy)
        with_adapters = adapted(model).train()
        counting.adopt(with_adapters)
        apply_checkpointing(model, checkpointing)
        for _ in range(2):
            tokens = torch.ones(2, 9, dtype=torch.long)
            ledger.set_phase(Phase.FORWARD)
            loss = with_adapters(input_ids=tokens, labels=tokens).loss
            ledger.set_phase(Phase.BACKWARD)
            loss.backward()
            del loss
    return counting.sections()


@pytest.mark.parametrize(
    ("make", "policy", "enabled"),
    [
        (llama, DOUBLE, False),
        (llama, SINGLE, True),
        (qwen2, DOUBLE, True),
        (gpt2, DOUBLE, False),
        (falcon, SINGLE, False),
    ],
)
def test_fake_tensors_count_as_real_ones(
    make: Make, policy: QuantisationPolicy, enabled: bool
) -> None:
    """To the byte, in every phase and of every kind."""
    checkpointing = CheckpointingPolicy(enabled)
    real = sections_of_a_step(make, policy, checkpointing)
    import_library()
    with fake_tensors():
        fake = sections_of_a_step(make, policy, checkpointing)
    assert fake == real


# Two ranks


def one_rank(rank: int, folder: Path) -> None:
    """Train one step on this rank's half of the batch; leave loss, gradients and local bytes."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    model = quantised(llama)
    with_adapters = adapted(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(with_adapters, mesh=mesh)
    loss, gradients = loss_and_gradients(with_adapters, ids(4)[2 * rank : 2 * rank + 2])
    results = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    local = [
        parameter.to_local().nbytes
        for layer in layers_of(model).values()
        for parameter in layer.quantised_parameters()
    ]
    extras = {"loss": loss, "local_bytes": torch.tensor(sum(local))}
    save_file(results | extras, folder / f"{rank}.safetensors")
    torch.distributed.destroy_process_group()


def test_two_ranks_share_the_base(tmp_path: Path) -> None:
    """Each has half of the bytes; together they compute what one computes.

    The tolerance is fp32's rounding: the mean over the batch is summed in another order.
    """
    command = [sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    model = quantised(llama)
    loss, gradients = loss_and_gradients(adapted(model), ids(4))
    torch.testing.assert_close((first["loss"] + second["loss"]) / 2, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], gradient, rtol=1e-5, atol=1e-7)
    whole = sum(
        parameter.nbytes
        for layer in layers_of(model).values()
        for parameter in layer.quantised_parameters()
    )
    assert first["local_bytes"] + second["local_bytes"] == whole
    assert first["local_bytes"] == pytest.approx(whole / 2, rel=0.01)


# What cannot be


def test_no_policy_leaves_the_model_alone() -> None:
    model = made(llama)
    apply_quantisation(model, None)
    assert not layers_of(model)


def test_eight_bits_are_refused_and_nothing_is_changed() -> None:
    model = made(llama)
    with pytest.raises(UnsupportedError, match="set quantization_bit: 4"):
        apply_quantisation(model, QuantisationPolicy(bits=8))
    assert not layers_of(model)


def test_a_quantised_model_is_not_quantised_again() -> None:
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no linear layers to quantise"):
        apply_quantisation(quantised(llama), DOUBLE)


def test_an_odd_number_of_weights_is_refused_and_nothing_is_changed() -> None:
    model = made(llama)
    model.get_submodule("model.layers.1.mlp").add_module("odd", nn.Linear(7, 9))
    with pytest.raises(UnsupportedError) as caught:
        apply_quantisation(model, DOUBLE)
    assert str(caught.value) == (
        "model.layers.1.mlp.odd has 9 x 7 weights, an odd number, which cannot be packed in "
        "pairs; leave quantization_bit out"
    )
    assert not layers_of(model)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'tightfit\[qlora\]'"):
        apply_quantisation(made(llama), DOUBLE)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # as ranks of a run do: gloo's threads may not outlive the interpreter
