"""Applies a plan's policies to a model, in the one order in which they work.

What the base is made of first; then adapters, since they decide what is trained; then what changes
forward (attention, loss, checkpointing); then who holds which part of it; then gradients and
optimizer, which need the final list of parameters.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.engine.adapter import apply_adapter
from tightfit.engine.attention import apply_attention
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.engine import Engine
from tightfit.engine.gradients import DeviceGradients, GradientStore, HostGradients
from tightfit.engine.loss import apply_loss
from tightfit.engine.optimizer import PlacedAdamW
from tightfit.engine.quantisation import apply_quantisation, is_quantised
from tightfit.engine.sharding import apply_sharding
from tightfit.engine.supported import check_engine_can
from tightfit.engine.transfer import Transfer
from tightfit.errors import ConfigError
from tightfit.policies import Policies, Tier

_FITTED = "_fitted_by_tightfit"


def fit(model: PreTrainedModel, policies: Policies) -> Engine:
    """Make `model` train as `policies` say.

    Args:
        model: a causal language model of transformers, on its device, in its final type. It is
            changed in place; use `engine.model` afterwards (LoRA wraps it). With several ranks,
            the same on each. A base that was quantised while it was loaded stays as it is.

    Raises:
        UnsupportedError: the model cannot do what a policy asks.
        ConfigError: a LoRA target that the model does not have, a model that was fitted before,
            nothing in it to train, or other ranks than the policies are for.
    """
    if hasattr(model, _FITTED):
        raise ConfigError(
            "this model was fitted before, and its forward and gradients belong to that engine; "
            "load it again"
        )
    check_engine_can(policies)
    ledger.set_phase(Phase.INIT)
    if not is_quantised(model):
        apply_quantisation(model, policies.quantisation)
    adapted = apply_adapter(model, policies.adapter)
    if policies.adapter is not None:
        _adopt(adapted)
    apply_attention(model, policies.attention)
    apply_loss(model, policies.loss)
    apply_checkpointing(model, policies.checkpointing)
    if not any(p.requires_grad for p in adapted.parameters()):
        raise ConfigError("nothing to train: all parameters of the model are frozen")
    ranks = apply_sharding(adapted, model, policies)
    setattr(model, _FITTED, True)
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    transfer = Transfer(trainable[0].device)
    optimizer = PlacedAdamW(
        trainable, policies.optimizer, policies.placement.optimizer_states, transfer, ranks
    )
    adapted.train()
    gradients = _gradient_store(trainable, policies, transfer)
    return Engine(adapted, optimizer, gradients, ranks, policies.batch.accumulation_steps)


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
