"""Which implementation of attention a model runs.

transformers picks one when it builds a model; this sets the plan's, and refuses what cannot run
before it fails inside a layer. Knows nothing of what an implementation allocates: the dry run
does (`dry_run/kernels.py`), and puts a stand-in here for the flash-attention package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.import_utils import is_flash_attn_2_available

from tightfit.errors import UnsupportedError
from tightfit.policies import AttentionKernel, AttentionPolicy

_IMPLEMENTATIONS = {
    AttentionKernel.SDPA: "sdpa",
    AttentionKernel.FLASH: "flash_attention_2",
    AttentionKernel.EAGER: "eager",
}
_HALF = (torch.bfloat16, torch.float16)

_FLASH_FROM = (8, 0)  # compute capability that the package's kernels are made for

_flash_stand_in: str | None = None


def apply_attention(model: PreTrainedModel, policy: AttentionPolicy) -> None:
    """Make every layer of `model` run the policy's kernel.

    Raises:
        UnsupportedError: the model's class does not support it, or this machine cannot run it.
    """
    kernel = policy.kernel
    _check_supported(type(model), kernel)
    implementation = _IMPLEMENTATIONS[kernel]
    if kernel is AttentionKernel.FLASH:
        _check_type(model)
        if _flash_stand_in is None:
            _check_flash_runs(model)
        implementation = _flash_stand_in or implementation
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise UnsupportedError(
            f"{type(model).__name__} keeps its own attention ({model.config._attn_implementation})"
            f" whatever is asked for; set attention: {model.config._attn_implementation}"
        )


def supported_kernels(config: PretrainedConfig) -> tuple[AttentionKernel, ...]:
    """What the model class of `config` supports on a machine that can run it, best first.

    Scaled dot-product attention comes first: it needs no package and picks torch's flash kernel
    where nothing forbids it. Soft-capped scores (Gemma 2) cannot use it.
    """
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return tuple(kernel for kernel in AttentionKernel if _supports(model_class, kernel))


def check_flash_capability(capability: tuple[int, int]) -> None:
    """See that a card of this compute capability has the package's kernels.

    Raises:
        UnsupportedError: it is too old.
    """
    if capability < _FLASH_FROM:
        raise UnsupportedError(
            "attention: flash needs a card of compute capability 8.0 (Ampere) or newer, and this "
            f"one has {capability[0]}.{capability[1]}; set attention: sdpa"
        )


@contextmanager
def flash_stand_in(implementation: str) -> Iterator[None]:
    """Inside, `flash` means `implementation`, registered with transformers, on any machine."""
    global _flash_stand_in
    before, _flash_stand_in = _flash_stand_in, implementation
    try:
        yield
    finally:
        _flash_stand_in = before


def _supports(model_class: type[PreTrainedModel], kernel: AttentionKernel) -> bool:
    if kernel is AttentionKernel.SDPA:
        return bool(model_class._supports_sdpa)
    return kernel is AttentionKernel.EAGER or bool(model_class._supports_flash_attn)


def _check_supported(model_class: type[PreTrainedModel], kernel: AttentionKernel) -> None:
    if not _supports(model_class, kernel):
        others = " or ".join(k for k in AttentionKernel if _supports(model_class, k))
        raise UnsupportedError(
            f"{model_class.__name__} does not support attention: {kernel}; set attention: {others}"
        )


def _check_type(model: PreTrainedModel) -> None:
    if not any(parameter.dtype in _HALF for parameter in model.parameters()):
        raise UnsupportedError(
            "attention: flash computes in 16 bits and this model is in "
            f"{str(model.dtype).removeprefix('torch.')}; set precision: bf16, or attention: sdpa"
        )


def _check_flash_runs(model: PreTrainedModel) -> None:
    if model.device.type != "cuda":
        raise UnsupportedError(
            f"attention: flash needs an NVIDIA card and the model is on {model.device.type}; "
            "set attention: sdpa"
        )
    if not is_flash_attn_2_available():
        raise UnsupportedError(
            "attention: flash needs the package flash-attn, which is not installed; install it, "
            "or set attention: sdpa, which runs torch's own flash kernel and allocates the same"
        )
    check_flash_capability(torch.cuda.get_device_capability(model.device))
