"""LoRA, rsLoRA and DoRA adapters on a frozen base, through peft.

Values are peft's own, but every layer draws its from a seed made of its name: so a pipeline stage,
which has some of the layers, begins with what one process would have there. Knows nothing of other
techniques; the model it returns trains and saves as any peft model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tightfit.engine.dora import without_weights
from tightfit.engine.quantisation import import_library as import_bitsandbytes
from tightfit.engine.tensor_plan import is_adapted
from tightfit.engine.whole_modules import train_whole
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import AdapterPolicy

if TYPE_CHECKING:
    from peft import LoraConfig


def import_library() -> None:
    """Import peft, which makes tensors of its own: do it where nothing is counted or faked."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        import_bitsandbytes()  # peft does too, 4 bits or not, and less quietly
    import peft  # noqa: F401  # takes a second, only LoRA needs it


def apply_adapter(model: PreTrainedModel, policy: AdapterPolicy | None) -> nn.Module:
    """The model with adapters and everything frozen that is not to be trained whole beside them, or
    the model itself without a policy.

    What adapters begin with depends on torch's random state, as with peft.

    Raises:
        ConfigError: a target names no module of the model.
        UnsupportedError: a layer cannot have such an adapter.
    """
    if policy is None:
        return model
    import_library()
    from peft import LoraConfig

    missing = [name for name in policy.targets if not _names_a_module(model, name)]
    if missing:
        linear = sorted(
            {
                path.rsplit(".", 1)[-1]
                for path, module in model.named_modules()
                if isinstance(module, nn.Linear | Conv1D)
            }
        )
        raise ConfigError(
            f"lora_target {', '.join(missing)}: no such module in the model; "
            f"its linear layers are {', '.join(linear)}"
        )
    config = LoraConfig(
        r=policy.rank,
        lora_alpha=policy.alpha,  # type: ignore[arg-type]  # peft divides, a float works
        lora_dropout=policy.dropout,
        use_rslora=policy.rslora,
        use_dora=policy.dora,
        target_modules=list(policy.targets) or "all-linear",
        fan_in_fan_out=_stores_transposed(model),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers under a name that will go, and does not find what it has
        # itself renamed where experts are stored together.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", "The following .*_pattern keys", RuntimeWarning)
        seed = _random_state()
        with without_weights() if policy.dora else nullcontext():
            adapted = _wrapped(model, config, policy)
    _draw_by_name(adapted, seed)
    train_whole(adapted, model, policy)
    return adapted


def _wrapped(model: PreTrainedModel, config: LoraConfig, policy: AdapterPolicy) -> nn.Module:
    """peft's model of both.

    Raises:
        UnsupportedError: peft has no such adapter for a layer that is named.
    """
    from peft import get_peft_model

    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        said = {"use_dora": policy.dora, "lora_dropout": policy.dropout > 0}
        without = " and ".join(key for key, is_said in said.items() if is_said)
        if not without:
            raise
        raise UnsupportedError(
            f"{without} on some of the layers of lora_target, which mixture models keep in one "
            f"tensor for all experts ({error}): name others, such as q_proj,k_proj,v_proj,o_proj, "
            f"or leave {without} out"
        ) from None
    if policy.dora and any(is_adapted(module) for module in _embeddings(model)):
        raise UnsupportedError(
            "use_dora on an embedding: name linear layers in lora_target, train the embedding "
            "whole (additional_target), or leave use_dora out"
        )
    return adapted


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if isinstance(getattr(m, "base_layer", m), nn.Embedding))


def _random_state() -> bytes:
    """What torch would draw from next."""
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()


def _draw_by_name(adapted: nn.Module, seed: bytes) -> None:
    """Draw the values of each layer's adapter again; what torch draws next is not changed."""
    from peft.tuners.lora import LoraLayer

    layers = {n: m for n, m in adapted.named_modules() if isinstance(m, LoraLayer)}
    cards = {p.device.index or 0 for p in adapted.parameters() if p.is_cuda}
    # Without a card the CPU's generator alone: torch tells all others, with a trace for each.
    start_from = torch.manual_seed if cards else torch.default_generator.manual_seed
    with torch.random.fork_rng(cards):
        for name, layer in layers.items():
            digest = hashlib.sha256(seed + name.encode()).digest()
            start_from(int.from_bytes(digest[:8]) % 2**63)
            for adapter in layer.r:
                layer.reset_lora_parameters(adapter, init_lora_weights=True)


def _stores_transposed(model: nn.Module) -> bool:
    """Whether its layers are GPT-2's, `[in, out]`; peft would find out too, and warn."""
    return any(isinstance(module, Conv1D) for module in model.modules())


def _names_a_module(model: nn.Module, name: str) -> bool:
    return any(path == name or path.endswith("." + name) for path, _ in model.named_modules())
