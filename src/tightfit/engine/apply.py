"""Applies a plan's policies to a model, in the one order in which they work.

Adapters first, since they decide what is trained; then what changes forward (loss,
checkpointing); then gradients and optimizer, which need the final list of parameters.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.engine.adapter import apply_adapter
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.engine import Engine
from tightfit.engine.gradients import DeviceGradients, GradientStore, HostGradients
from tightfit.engine.loss import apply_loss
from tightfit.engine.optimizer import PlacedAdamW
from tightfit.engine.transfer import Transfer
from tightfit.errors import ConfigError
from tightfit.policies import Policies, Tier

_FITTED = "_fitted_by_tightfit"


def fit(model: PreTrainedModel, policies: Policies) -> Engine:
    """Make `model` train as `policies` say.

    Args:
        model: a causal language model of transformers, on its device, in its final type. It is
            changed in place; use `engine.model` afterwards (LoRA wraps it).

    Raises:
        UnsupportedError: the model cannot do what a policy asks.
        ConfigError: a LoRA target that the model does not have, a model that was fitted before,
            or nothing in it to train.
    """
    if hasattr(model, _FITTED):
        raise ConfigError(
            "this model was fitted before, and its forward and gradients belong to that engine; "
            "load it again"
        )
    ledger.set_phase(Phase.INIT)
    adapted = apply_adapter(model, policies.adapter)
    if policies.adapter is not None:
        _adopt(adapted)
    apply_loss(model, policies.loss)
    apply_checkpointing(model, policies.checkpointing)
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("nothing to train: all parameters of the model are frozen")
    setattr(model, _FITTED, True)
    transfer = Transfer(trainable[0].device)
    optimizer = PlacedAdamW(
        trainable, policies.optimizer, policies.placement.optimizer_states, transfer
    )
    adapted.train()
    return Engine(adapted, optimizer, _gradient_store(trainable, policies, transfer))


def _gradient_store(
    trainable: list[nn.Parameter], policies: Policies, transfer: Transfer
) -> GradientStore:
    if policies.placement.gradients is Tier.HOST:
        return HostGradients(trainable, transfer)
    return DeviceGradients(trainable)


def _adopt(module: nn.Module) -> None:
    """Book the adapters' own parameters as parameters."""
    counting = ledger.active()
    if counting is not None:
        counting.adopt(module)
