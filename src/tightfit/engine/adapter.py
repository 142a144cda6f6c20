"""LoRA adapters on a frozen base, through peft.

Knows nothing of other techniques; the model it returns trains and saves as any peft model.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tightfit.errors import ConfigError
from tightfit.policies import AdapterPolicy


def apply_adapter(model: PreTrainedModel, policy: AdapterPolicy | None) -> nn.Module:
    """The model with adapters and everything else frozen, or the model itself without a policy.

    Raises:
        ConfigError: a target names no module of the model.
    """
    if policy is None:
        return model
    from peft import LoraConfig, get_peft_model  # takes a second to import, only LoRA needs it

    missing = [name for name in policy.targets if not _names_a_module(model, name)]
    if missing:
        linear = sorted(
            {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        )
        raise ConfigError(
            f"lora_target {', '.join(missing)}: no such module in the model; "
            f"its linear layers are {', '.join(linear)}"
        )
    config = LoraConfig(
        r=policy.rank,
        lora_alpha=policy.alpha,  # type: ignore[arg-type]  # peft divides, a float works
        lora_dropout=policy.dropout,
        target_modules=list(policy.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _names_a_module(model: nn.Module, name: str) -> bool:
    return any(path == name or path.endswith("." + name) for path, _ in model.named_modules())
