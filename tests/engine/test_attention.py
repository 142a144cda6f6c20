"""The kernel a plan names is the one that runs; what cannot run is refused with what can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.masking_utils import flash_attention_mask

from tightfit.engine.attention import apply_attention, flash_stand_in, supported_kernels
from tightfit.errors import UnsupportedError
from tightfit.policies import AttentionKernel, AttentionPolicy

SDPA, FLASH, EAGER = AttentionKernel.SDPA, AttentionKernel.FLASH, AttentionKernel.EAGER
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (LlamaConfig(), (SDPA, FLASH, EAGER)),
        (Qwen3Config(), (SDPA, FLASH, EAGER)),
        (GPT2Config(), (SDPA, FLASH, EAGER)),
        (Gemma2Config(), (FLASH, EAGER)),
        (GptOssConfig(), (FLASH, EAGER)),
        (BloomConfig(), (EAGER,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_supported_kernels(config: PretrainedConfig, kernels: tuple[AttentionKernel, ...]) -> None:
    assert supported_kernels(config) == kernels


def test_every_kernel_gives_the_same_logits(make_model: Callable[..., LlamaForCausalLM]) -> None:
    logits = {}
    ids = torch.arange(3, 20).unsqueeze(0)
    for kernel, name in ((SDPA, "sdpa"), (EAGER, "eager")):
        model = make_model()
        apply_attention(model, AttentionPolicy(kernel))
        assert model.config._attn_implementation == name
        logits[kernel] = model(input_ids=ids).logits
    torch.testing.assert_close(logits[SDPA], logits[EAGER])


def test_eager_holds_the_scores(make_model: Callable[..., LlamaForCausalLM]) -> None:
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    for kernel, holds in ((SDPA, False), (EAGER, True)):
        saved.clear()
        model = make_model()
        apply_attention(model, AttentionPolicy(kernel))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(input_ids=torch.arange(3, 20).unsqueeze(0))
        assert (torch.Size([1, 4, 17, 17]) in saved) is holds


def test_soft_capped_scores_cannot_use_sdpa() -> None:
    model = AutoModelForCausalLM.from_config(Gemma2Config(**SMALL, head_dim=4))
    with pytest.raises(UnsupportedError, match=r"Gemma2.*sdpa; set attention: flash or eager"):
        apply_attention(model, AttentionPolicy(SDPA))
    apply_attention(model, AttentionPolicy(EAGER))


def test_a_model_with_attention_of_its_own_is_not_silently_left_as_it_is() -> None:
    config = FalconConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    apply_attention(model, AttentionPolicy(SDPA))
    with pytest.raises(UnsupportedError, match=r"Falcon.*set attention: sdpa"):
        apply_attention(model, AttentionPolicy(EAGER))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float32, "computes in 16 bits and this model is in float32; set precision: bf16"),
        (torch.bfloat16, "needs an NVIDIA card and the model is on cpu; set attention: sdpa"),
    ],
)
def test_flash_does_not_run_here(
    dtype: torch.dtype, message: str, make_model: Callable[..., LlamaForCausalLM]
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        apply_attention(make_model(dtype), AttentionPolicy(FLASH))


def test_flash_without_its_package_names_what_does_the_same(
    make_model: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"))
    monkeypatch.setattr("tightfit.engine.attention.is_flash_attn_2_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"package flash-attn.*set attention: sdpa"):
        apply_attention(make_model(torch.bfloat16), AttentionPolicy(FLASH))


def test_flash_needs_an_ampere_card(
    make_model: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"))
    monkeypatch.setattr("tightfit.engine.attention.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedError, match=r"this one has 7\.5; set attention: sdpa"):
        apply_attention(make_model(torch.bfloat16), AttentionPolicy(FLASH))


def test_a_stand_in_runs_for_flash_while_it_is_there(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    calls = []

    def attention(
        module: Any, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        calls.append(query.shape)
        return query.transpose(1, 2), None

    AttentionInterface.register("a_stand_in", attention)
    AttentionMaskInterface.register("a_stand_in", flash_attention_mask)
    model = make_model(torch.bfloat16)
    with flash_stand_in("a_stand_in"):
        apply_attention(model, AttentionPolicy(FLASH))
    model(input_ids=torch.arange(3, 20).unsqueeze(0))
    assert calls == [torch.Size([1, 4, 17, 4])] * 2
    with pytest.raises(UnsupportedError, match="NVIDIA card"):
        apply_attention(make_model(torch.bfloat16), AttentionPolicy(FLASH))
